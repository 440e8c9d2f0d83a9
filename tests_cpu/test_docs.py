"""The documentation agrees with the code: rooms and modules, public names, files that pages name."""

import functools
import json
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from benchmarks import neighbours, unseen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
rooms, api, cause_pages = __import__("rooms"), __import__("api"), __import__("cause_pages")


def test_the_drawing_of_rooms_follows_from_the_imports() -> None:
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.page_with(text) == text, "run python docs/rooms.py, which draws it again"


def test_the_page_of_public_names_is_made_from_their_docstrings() -> None:
    text = api.PAGE.read_text(encoding="utf-8")
    assert text == api.page(), "run python docs/api.py, which writes it again"
    assert "No docstring." not in text


def test_the_tables_of_benchmarks_and_plugins_are_those_of_their_results() -> None:
    sets, matrix = (
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("benchmarks_diagnosis.md", "plugins.md")
    )
    assert unseen.page_with(sets) == sets, "run python benchmarks/unseen.py, which writes the table again"
    results = json.loads(neighbours.RESULTS.read_text(encoding="utf-8"))
    assert neighbours.page_with(matrix, results) == matrix, "run python benchmarks/neighbours.py --table"
    for page in (ROOT / "docs").glob("benchmarks*.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 150, "figures belong into benchmarks/results"


def test_each_set_of_unseen_faults_is_counted_within_its_size() -> None:
    for row in unseen.sets():
        of = {"line": "lines", "end_line": "lines", "line_or_caller": "lines", "ended": "healthy"}
        for name in ("cause_and_ranks", "ranks", "line", "line_or_caller", "end_cause_and_ranks", "end_line", "ended"):
            assert 0 <= row.get(name, 0) <= row.get(of.get(name, ""), row["faults"]), (row["set"], name)


def test_a_limit_is_a_line_below_its_topic() -> None:
    text = (ROOT / "docs" / "limitations.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)", text, re.M) == ["Ranks", "Diagnosis", "Kernels", "Training"]
    limits = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in limits if not re.fullmatch(r"- .*\.", line)] == []


KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_the_changelog_is_a_line_per_behaviour() -> None:
    """From 0.2.0 on; the first release stays as it was. What is not released is in fragments alone."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "Unreleased" not in text, "write a fragment: changelog.d/+WHAT.KIND.md"
    for section in re.split(r"^## ", text.partition("## [0.1.0]")[0], flags=re.M)[1:]:
        for line in section.splitlines()[1:]:
            assert not line or line in [f"### {kind}" for kind in KINDS] or re.fullmatch(r"- .*[.)]", line), line
    for fragment in (ROOT / "changelog.d").glob("*"):
        if fragment.name != ".gitignore":
            assert re.fullmatch(rf"\+[a-z0-9-]+\.({'|'.join(KINDS).lower()})\.md", fragment.name), fragment.name
            (line,) = fragment.read_text(encoding="utf-8").splitlines()
            assert re.fullmatch(r".*[.)]", line), fragment.name


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a circle: (a -> b -> a|b -> a -> b)"):
        rooms.shortest({"a": {"b"}, "b": {"a"}})


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types alone count as well: the drawing leaves those for types out."""
    graph = grimp.build_graph("pytest_nsa", "nsa", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["nsa.config"] >= {"nsa.sections"}
    TopologicalSorter(imports).prepare()  # CycleError names the modules of a circle


def test_every_room_and_module_of_the_plugin_is_described() -> None:
    """There is a row per room, which names each of its modules."""
    rows = dict(re.findall(r"^\| `([a-z]+)/` \| [^|]+ \| (.*) \|$", rooms.PAGE.read_text(encoding="utf-8"), re.M))
    folders = [p for p in (ROOT / "pytest_nsa").iterdir() if (p / "__init__.py").is_file()]
    for folder in folders:
        named = set(re.findall(r"`([a-z_]+)/?`", rows[folder.name]))
        there = {p.stem for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()} - {"__init__"}
        assert there - named == set(), folder.name


@functools.cache
def _modules() -> tuple[str, ...]:
    """Return the modules below this folder, once: an environment is there, too."""
    return tuple(f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=lambda p: p.stem)
def test_files_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(
        r"(?<![\w/.])((?:pytest_nsa|nsa|tests_cpu|tests_gpu|benchmarks|docs|examples|configs)/[\w./-]*\w)", text
    )
    missing = [
        name for name in dict.fromkeys(named)
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists() and not list(ROOT.glob(f"{name}*"))
    ]  # fmt: skip
    short = re.findall(r"`((?!scripts/)[\w/]+\.py)\b", text)  # scripts/ is the plan's, which the walk translates
    missing += [name for name in short if not any(path.endswith(f"/{name}") for path in _modules())]
    assert missing == []
    for target in re.findall(r"\]\(([\w./-]+\.md)[#)]", text):
        assert (page.parent / target).exists(), target


def test_the_walk_names_the_lines_of_its_faults() -> None:
    text = (ROOT / "docs" / "walk.md").read_text(encoding="utf-8")
    for path, shown, fault in (
        ("tests_cpu/plan/faults.py", r"tests_cpu/plan/faults\.py:(\d+)", "with never_released:"),
        ("examples/downstream/small_transformer.py", r"small_transformer\.py:(\d+)", "if count == 0:"),
    ):
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        assert {lines[int(number) - 1].strip() for number in re.findall(shown, text)} == {fault}


@pytest.mark.parametrize("page", cause_pages.PAGES, ids=lambda p: p.stem)
def test_the_page_of_a_cause_shows_a_short_planted_fault_and_its_verdict_as_they_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert cause_pages.page_with(text) == text, "run python docs/cause_pages.py, which writes it again"
    assert re.findall(r"^## (.*)", text, re.M) == ["What you see", "How we know", "What to do"]
    assert all(part.strip() for part in re.split(r"^#.*", text, flags=re.M)[1:])
    assert re.search(r"\d\s?%", re.sub(r"```python.*?```", "", text, flags=re.S)) is None
    shown = list(cause_pages.SHOWN.finditer(text))
    assert shown or page.stem in ("device_busy", "transport_stuck", "unknown")  # which need a GPU, a network or luck
    assert len(shown) == text.count("```python")
    for fault in shown:
        assert cause_pages.size(fault["archive"], fault["test"]) <= cause_pages.MOST_LINES
        assert re.match(rf"(HANG|CRASH|FAIL|SLOW): .*\b{page.stem}\b", fault["verdict"])
