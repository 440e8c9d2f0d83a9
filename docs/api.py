"""Writes docs/api.md, the public names, from their docstrings. `python docs/api.py` writes it anew."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")


def page() -> str:
    """The whole page."""
    import nsa
    import pytest_nsa
    from pytest_nsa import hookspecs, plugin
    from pytest_nsa.marks import RULES
    from pytest_nsa.rank import handles

    out = ["# Public names", "", "Made from their docstrings by `python docs/api.py`.", ""]
    out += [
        "## Marks",
        "",
        "From `pytest_nsa`, as decorators. `@pytest.mark.NAME` is the same on a test on ranks, where the test's module, "
        "a conftest.py or a plugin imports `pytest_nsa`, or ini `ranks_marks` is true; elsewhere it is another suite's mark. "
        "`pytest --markers` lists them.",
        "",
    ]
    out += [line for name, rule in sorted(RULES.items()) for line in entry(f"{name}{rule.form}", rule.text)]
    out += ["## Fixtures", "", "`pytest --fixtures` lists them.", ""]
    for name in sorted(set(plugin.__all__) - {"is_active"}):
        out += entry(name, inspect.getdoc(_get_function(getattr(plugin, name))) or "")
    out += entry("host_fixture" + signature(pytest_nsa.host_fixture), inspect.getdoc(pytest_nsa.host_fixture) or "")
    out += ["## What they return", ""]
    for name in ("Group", "DDP", "FSDP", "Trace"):
        out += members(getattr(handles, name))
    for kind in (pytest_nsa.Verdict, pytest_nsa.Outcome, pytest_nsa.LayerRange):
        out += members(kind)
    out += ["## Hooks", ""]
    out += functions(hookspecs, lambda name: name.startswith("pytest_nsa"))
    out += ["## Options and ini values", "", *options(), ""]
    out += ["## The configuration of `nsa.train`", "", *configuration()]
    out += ["## `nsa`", ""]
    for name in sorted(nsa.__all__):
        value = getattr(nsa, name)
        if inspect.isclass(value):
            out += members(value, is_made_by_users=name not in ("Config", "ConfigError"))
        elif callable(value):
            out += entry(name + signature(value), inspect.getdoc(value) or "")
    return "\n".join(out).rstrip() + "\n"


def entry(title: str, text: str) -> list[str]:
    """A title and its text."""
    return [f"### `{title}`", "", text.strip() or "No docstring.", ""]


class Declared:
    """Takes the place of pytest's parser, and keeps the options and ini values that are declared to it: name and help."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def getgroup(self, name: str, description: str) -> Declared:
        return self

    def addoption(self, name: str, *, help: str, metavar: str = "", choices: Sequence[str] = (), **_: Any) -> None:
        value = metavar or "|".join(choices)
        self.rows.append((f"{name}{f'={value}' if value else ''}", help))

    def addini(self, name: str, help: str, *, default: Any = "", **_: Any) -> None:
        self.rows.append((name, help))


def options() -> list[str]:
    """A table of the options, and of the ini values."""
    from pytest_nsa.settings import add_options

    declared = Declared()
    add_options(declared)  # type: ignore[arg-type]
    rows = [
        f"| `{name.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |" for name, text in declared.rows
    ]
    return ["| option or ini value | effect |", "| --- | --- |", *rows]


def configuration() -> Iterator[str]:
    """Each section of a configuration: its text, and its fields with their defaults."""
    from nsa.sections import SECTIONS

    for name, section in SECTIONS.items():
        shown = ", ".join(f"{f.name} = {json.dumps(f.default)}" for f in dataclasses.fields(section))
        yield from entry(name, f"{inspect.getdoc(section)}\n\nFields and defaults: `{shown}`.")


def members(kind: type, *, is_made_by_users: bool = False) -> list[str]:
    """A class and its public methods and properties; how it is made, where users make it; what calling it takes, of a module."""
    own = {
        n: v
        for n, v in vars(kind).items()
        if not n.startswith("_") and (inspect.isfunction(v) or isinstance(v, property))
    }
    made = signature(kind.__init__) if is_made_by_users else ""
    out = entry(kind.__name__ + made, inspect.getdoc(kind) or "")
    for name, value in own.items():
        text = inspect.getdoc(value)
        if text and (name != "forward" or is_made_by_users):
            called = "layer" if name == "forward" else name  # a module is called by its name
            shown = name if isinstance(value, property) else called + signature(value)
            out += [f"- `{shown}`: {' '.join(text.split())}"]
    return [*out, ""] if out[-1] else out


def functions(module: Any, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Functions of a module, by name."""
    for name, value in sorted(vars(module).items()):
        if inspect.isfunction(value) and wanted(name):
            yield from entry(name + signature(value), inspect.getdoc(value) or "")


def signature(function: Callable[..., Any]) -> str:
    """Without annotations, which the docstrings say better."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters if p.name != "self"]
    return re.sub(r" -> .*$", "", str(inspect.Signature(plain)))


def _get_function(fixture: Any) -> Any:
    return getattr(fixture, "_get_wrapped_function", lambda: fixture)()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
