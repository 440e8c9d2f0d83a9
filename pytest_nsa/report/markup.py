"""HTML and SVG with automatic escaping: only `tag` makes markup of text, so no text of a test can act on the page."""

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources

from pytest_nsa.report.plain import escape

_VOID = frozenset({"meta", "link", "input", "br"})


class Markup(str):
    """Text that is HTML already. All other text is escaped when it is put between tags."""

    __slots__ = ()


Child = str | int | Iterable["Child"] | None


def markup(child: Child) -> Markup:
    """Return children as HTML: text and numbers escaped, `Markup` unchanged, None as ''."""
    if child is None:
        return Markup("")
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int):
        return Markup(escape(str(child)))
    return Markup("".join(markup(c) for c in child))


def tag(element: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Return an element. ``class_`` and ``for_`` lose their last letter, other underscores become hyphens; False and None are
    omitted, True has no value.
    """
    shown = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        shown.append(f" {attribute}" if value is True else f' {attribute}="{escape(_text(value))}"')
    opened = f"<{element}{''.join(shown)}>"
    return Markup(opened if element in _VOID else f"{opened}{markup(children)}</{element}>")


def row(*cells: Child) -> Markup:
    """Return a row of a table."""
    return tag("tr", *(tag("td", cell) for cell in cells))


def table(names: Iterable[Child], rows: Iterable[Markup], class_: str | None = None) -> Markup:
    """Return a table with ``names`` above its columns. It scrolls where it is wider than the page."""
    head = tag("tr", *(tag("th", name, scope="col") for name in names))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_=class_), class_="scroll")


def _text(value: str | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def file(name: str) -> Markup:
    """Return the text of a file of this package, for a page."""
    return Markup(resources.files("pytest_nsa.report").joinpath(name).read_text(encoding="utf-8"))


def document(title: str, body: Markup, script: Markup | None = None) -> str:
    """Return a page that makes no requests: its policy allows ``script`` and no other, even if a run's data contains one."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script is not None:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", file("report.css")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"
