"""Texts from tests and from folders, made fit to be read: no control character acts on a terminal, no markup on a page."""

from __future__ import annotations

import html
import re

from pytest_nsa.wire import masking

# Colours stay; what moves a cursor, sets a title, or ends a line elsewhere does not.
_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def _name(match: re.Match[str]) -> str:
    text = match[0]
    return text if len(text) > 1 else f"\\x{ord(text):02x}" if ord(text) < 256 else f"\\u{ord(text):04x}"


def visible(text: str) -> str:
    """Return ``text`` for a terminal: control characters by name ('\\x1b'), but for colours, tabs and ends of lines; without
    secrets, where the session masks them.
    """
    return _CONTROL.sub(_name, masking.text(text))


def escape(text: str) -> str:
    """Return ``text`` for a page: neither markup nor control characters."""
    return html.escape(visible(text))


def markdown(text: str) -> str:
    """Return ``text`` for a line of Markdown: no tag, no link and no image of its own."""
    return _TAG.sub(r"\<", _line(text)).replace("](", "]\\(")


def code(text: str) -> str:
    """Return ``text`` for between two backticks."""
    return _line(text).replace("`", "'")


def _line(text: str) -> str:
    return visible(_COLOUR.sub("", text)).replace("\n", " ")
