"""Writes docs/verdict.schema.json, the JSON Schema of verdict.json, from the dataclasses: `python docs/schema.py`."""

import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

FILE = Path(__file__).with_name("verdict.schema.json")
_KINDS: dict[str, dict[str, Any]] = {
    "str": {"type": "string"}, "int": {"type": "integer"}, "float": {"type": "number"}, "bool": {"type": "boolean"},
    "tuple[int, ...]": {"type": "array", "items": {"type": "integer"}},
    "tuple[str, ...]": {"type": "array", "items": {"type": "string"}},
    "dict[str, float]": {"type": "object", "additionalProperties": {"type": "number"}}, "dict[str, Any]": {"type": "object"},
    "tuple[Fact, ...]": {"type": "array", "items": {"$ref": "#/$defs/fact"}},
    "tuple[Label, ...]": {"type": "array", "items": {"$ref": "#/$defs/label"}},
}  # fmt: skip


def schema() -> dict[str, Any]:
    """The whole schema. Unknown fields are allowed: a later version may add some."""
    from pytest_nsa.diagnosis.causes import CAUSES
    from pytest_nsa.diagnosis.verdict import FACT_IN_FILE, SCHEMA, Fact, Label, Outcome, Verdict

    kinds = {**_KINDS, "Outcome": {"enum": list(get_args(Outcome))}}
    verdict = _object(Verdict, kinds)
    verdict["properties"]["schema"] = {"const": SCHEMA}
    verdict["required"] = ["schema", *verdict["required"]]
    causes = ", ".join(sorted(CAUSES))
    verdict["properties"]["cause"] = {
        "type": "string",
        "description": f"'' for PASS and SKIP, else one of {causes}, or a cause that a repository's hook adds.",
    }
    verdict["properties"]["confidence"] = {"type": "number", "minimum": 0, "maximum": 1}
    verdict["properties"]["retry"] = {"enum": ["", "never", "once", "elsewhere"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "verdict.json of pytest-nsa",
        "description": " ".join((inspect.getdoc(Verdict) or "").split()), **verdict,
        "$defs": {"fact": _object(Fact, kinds, FACT_IN_FILE), "label": _object(Label, kinds)},
    }  # fmt: skip


def _object(
    of: Any, kinds: dict[str, dict[str, Any]], names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {names.get(f.name, f.name): dict(kinds[str(f.type)]) for f in fields(of)},
        "required": [
            names.get(f.name, f.name) for f in fields(of) if f.default is MISSING and f.default_factory is MISSING
        ],
    }


def text() -> str:
    """What the file holds."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.exit(0)
