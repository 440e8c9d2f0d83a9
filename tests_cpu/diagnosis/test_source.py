"""The statements around a location, kept with the evidence."""

import json
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.explain.source import find_loops, polled_condition
from pytest_nsa.evidence.source import FILE, Snippet, Sources, read_sources, record_sources

SOURCE = '''\
import functools

class Loader:
    """Its methods are kept one by one."""

    @functools.cache
    def take(self):
        for item in self.items:
            text = """
not indented"""
            self.send(item)
        return text

def spin():
    x = 0
    while True:
        x = x + 1
'''


def kept(tmp_path: Path, *lines: int) -> tuple[Path, Sources]:
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    record_sources(tmp_path, [(str(file), line) for line in lines], Sources())
    file.write_text("# edited\n" * 40)
    return file, read_sources(tmp_path)


def test_the_function_around_a_line_is_kept_and_nothing_else(tmp_path: Path) -> None:
    file, sources = kept(tmp_path, 11, 8, 16)
    assert [(s.first, s.last) for s in sources.snippets] == [(6, 12), (14, 17)]
    assert sources.line(str(file), 11) == "self.send(item)"
    assert sources.line(str(file), 3) == ""
    assert [type(n).__name__ for n in sources.around(f"{file}:11 in take")] == ["FunctionDef", "For", "Expr"]
    assert find_loops(sources, f"{file}:11 in take")
    assert not find_loops(sources, f"{file}:12 in take")


def test_the_function_of_a_decorator_is_kept(tmp_path: Path) -> None:
    """A rank that has left its test is at the first decorator, where the function's code begins."""
    file, sources = kept(tmp_path, 6)
    assert sources.line(str(file), 6) == "@functools.cache"


@pytest.mark.parametrize(
    "line", ["{}", '{"file": 1, "first": 1, "text": ""}', '{"file": "a.py", "first": -4, "text": "x"}', "[", "\x00"]
)
def test_what_a_stranger_wrote_is_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / FILE).write_text(line + "\n" + json.dumps({"file": "a.py", "first": 1, "text": "def f(:"}) + "\n")
    sources = read_sources(tmp_path)
    assert len(sources.snippets) == 1
    assert sources.around("a.py:1 in f") == ()


def test_a_caller_s_path_is_given_where_one_file_has_its_name() -> None:
    text = "def f():\n    g()"
    sources = Sources(
        [Snippet("/repo/src/a.py", 3, text), Snippet("/repo/src/b.py", 3, text), Snippet("/repo/b.py", 3, text)]
    )
    assert sources.with_path("a.py:4 in f") == "/repo/src/a.py:4 in f"
    assert sources.with_path("b.py:4 in f") == "b.py:4 in f"
    assert sources.with_path("/repo/b.py:4 in f") == "/repo/b.py:4 in f"
    assert sources.with_path("a.py:40 in f") == "a.py:40 in f"
    assert sources.with_path("") == ""


@pytest.mark.parametrize(
    ("loop", "condition", "is_of_memory"),
    [
        ("while not self.items:", "not self.items", True), ("while len(self.items) < n:", "len(self.items) < n", True),
        ("while not path.exists():", "not path.exists()", False), ("for _ in range(n):", "", False),
    ],
)  # fmt: skip
def test_the_condition_of_a_loop_that_pauses(loop: str, condition: str, is_of_memory: bool) -> None:
    text = f"def take(self, n, path):\n    {loop}\n        time.sleep(1)\n"
    assert polled_condition(Sources([Snippet("/a.py", 1, text)]), "/a.py:3 in take") == (condition, is_of_memory)


def test_the_condition_that_leaves_an_endless_loop() -> None:
    text = "def take(self):\n    while True:\n        if self.items:\n            return\n        time.sleep(1)\n"
    assert polled_condition(Sources([Snippet("/a.py", 1, text)]), "/a.py:5 in take") == ("not self.items", True)
