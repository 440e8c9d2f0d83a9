"""Escape texts from tests and folders: no control character acts on a terminal, and no markup on a page."""

import html
import re

from pytest_nsa.wire import masking

# Colours are kept; characters that move a cursor, set a title or end a line are replaced.
_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Characters that could become markup, which are written as entities; also a backslash that would escape one.
_MARKS = re.compile(r"<(?=[A-Za-z/!?])|&(?=\#?\w+;)|\\(?=[!-/:-@\[-`{-~])|(?<=\])[(:\[]")
_BLOCK = re.compile(r"^[#>+*=~`|_-]|^\d(?=\d{0,8}[.)])")  # what begins a heading, a list or a block

_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


def _name(match: re.Match[str]) -> str:
    text = match[0]
    return text if len(text) > 1 else f"\\x{ord(text):02x}" if ord(text) < 256 else f"\\u{ord(text):04x}"


def visible(text: str) -> str:
    """Return ``text`` for a terminal: control characters by name ('\\x1b'), except for colours, tabs and ends of lines; masked if
    the session masks secrets.
    """
    return _CONTROL.sub(_name, masking.text(text))


def escape(text: str) -> str:
    """Return ``text`` for a page, without markup and control characters."""
    return html.escape(visible(text))


def markdown(text: str) -> str:
    """Return ``text`` as a line of Markdown, escaped, so that it makes no tags, links, images and blocks."""
    return _BLOCK.sub(_entity, inline(text))


def inline(text: str) -> str:
    """Return ``text`` for the middle of a line of Markdown."""
    return _MARKS.sub(_entity, _line(text))


def code(text: str) -> str:
    """Return ``text`` as a code span, which may be in a cell of a table; '' for ''."""
    line = _line(text).replace("`", "'")
    return "" if not line else f"`{line}`" if "|" not in line else f"<code>{_PUNCTUATION.sub(_entity, line)}</code>"


def cell(text: str) -> str:
    """Return a line of Markdown for a cell of a table."""
    return text.replace("|", "&#124;")


def _entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};"


def _line(text: str) -> str:
    return visible(_COLOUR.sub("", text)).replace("\n", " ").strip()
