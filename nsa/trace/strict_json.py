"""Strict JSON. Python writes NaN and Infinity, which are not JSON: jq and JSON.parse reject the whole line."""

import math
from collections.abc import Mapping
from json import dumps  # bound before a test can replace it
from typing import Any


def to_json(value: Any, *, indent: int | None = None, as_text: bool = False) -> str:
    """Return ``value`` as JSON, on one line or indented. NaN and infinities are null; if ``as_text``, 'nan', 'inf' and '-inf'."""
    try:
        return dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # a NaN or an infinity
        return dumps(_without_nan(value, as_text), indent=indent, allow_nan=False)


def _without_nan(value: Any, as_text: bool) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value)) if as_text else None
    if isinstance(value, Mapping):
        return {key: _without_nan(one, as_text) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one, as_text) for one in value]
    return value
