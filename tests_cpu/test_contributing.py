"""The steps of CONTRIBUTING.md work as written: they change a copy of the repository, and its tests run."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def steps(chapter: str) -> list[str]:
    """Return the numbered steps of a chapter."""
    body = TEXT.partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    return re.split(r"\n(?=\d\. )", body)[1:]


def code(step: str, language: str = "python") -> str:
    """Return the block of a step in a language."""
    match = re.search(rf"```{language}\n(.*?)```", step, re.S)
    return textwrap.dedent(match[1])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path}: {old}"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository, without what runs leave in it."""
    ignored = shutil.ignore_patterns(".venv", ".git", "artifacts", "__pycache__", "results", ".*cache", ".hypothesis")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    return tmp_path / "copy"


def python(folder: Path, *arguments: str) -> str:
    """Return what Python prints that imports the copy."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, text=True, capture_output=True,
        timeout=160, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def run(folder: Path, *arguments: str) -> str:
    return python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments)


@pytest.mark.slow
def test_a_cause_is_added_by_the_steps(copy: Path) -> None:
    row, rule, _, fault, _ = steps("Add a cause")
    causes = copy / "pytest_nsa" / "diagnosis" / "causes.py"
    edit(causes, "_REGISTRY = (\n", "_REGISTRY = (\n" + textwrap.indent(code(row).rstrip() + ",\n", "    "))
    (causes.parent / "rules" / "clocks.py").write_text(code(rule), encoding="utf-8")
    engine = causes.parent / "engine.py"
    verdict = "from pytest_nsa.diagnosis.verdict import"
    edit(engine, verdict, f"from pytest_nsa.diagnosis.rules import clocks\n{verdict}")
    edit(engine, "    exits.rank_raised,\n", "    clocks.skewed,\n    exits.rank_raised,\n")
    faults = copy / "tests_cpu" / "faults"
    added = {"programs/raise.py": "\n\n" + code(fault), "evidence/rows.jsonl": code(fault, "json")}
    for file, text in added.items():
        (faults / file).write_text((faults / file).read_text() + text, encoding="utf-8")
    name = "test_a_clock_that_differs"
    recorded = run(copy, "tests_cpu/faults/test_corpus.py", "-k", name, "-m", "slow or not slow", "--record")
    assert "2 passed" in recorded, recorded  # and its twin
    without_pages = run(copy, "tests_cpu/diagnosis/test_causes.py")
    assert "test_the_documentation_lists_the_registry" in without_pages  # the cause has no page yet
    docs = copy / "docs" / "causes"
    page = f"Recorded as `{name}/{name}`:\n\n```python\n\n```\n\n```\n\n```\n"
    chapters = f"## What you see\n\n{page}\n## How we know\n\nx\n\n## What to do\n\nx\n"
    (docs / "clock_skew.md").write_text(f"# clock_skew\n\nThe clocks differ.\n\n{chapters}", encoding="utf-8")
    for script in ("cause_pages", "schema"):
        python(copy, f"docs/{script}.py")
    agree = run(copy, "tests_cpu/diagnosis/test_causes.py", "tests_cpu/test_docs.py", "tests_cpu/test_recipes.py", "-k",
                "test_causes or clock_skew or schema")  # fmt: skip
    assert " passed" in agree
    assert " failed" not in agree, agree
    assert "1 passed" in run(copy, "tests_cpu/diagnosis/test_recorded.py", "-k", name)


@pytest.mark.slow
def test_a_scenario_is_added_by_the_steps(copy: Path) -> None:
    row = code(steps("Add a scenario")[0])
    scenarios = copy / "tests_cpu" / "plan" / "scenarios.py"
    edit(scenarios, '    _mitigation("no_bucket_view"', f'    {row.strip()},\n    _mitigation("no_bucket_view"')
    assert "1 passed" in run(copy, "tests_cpu/plan/test_plan.py", "-k", "buckets_50mb")
    summary = (copy / "artifacts" / "latest" / "SUMMARY.md").read_text()
    assert "buckets_50mb" in summary
    assert "1/" in run(copy, "tests_gpu/test_plan.py", "-k", "buckets_50mb", "--collect-only")


@pytest.mark.slow
def test_a_backend_is_added_by_the_steps(copy: Path) -> None:
    module, row, *_ = steps("Add a backend of the attention")
    kernels = copy / "nsa" / "kernels"
    (kernels / "mine.py").write_text(code(module), encoding="utf-8")
    edit(kernels / "backends.py", '    "flash": Backend', "    " + code(row) + '    "flash": Backend')
    edit(kernels / "backends.py", "from nsa.kernels import ", "from nsa.kernels import mine, ")
    edit(copy / "nsa" / "sections.py", '"flash"]', '"flash", "mine"]')
    asked = "import torch, nsa; print(nsa.explain('mine', torch.float32, torch.device('cpu')))"
    assert "('mine', 'asked for')" in python(copy, "-c", asked)
    assert " passed" in run(copy, "tests_cpu/test_contributing.py", "-k", "registry_of_backends")
    assert "1 passed" in run(copy, "tests_cpu/kernels/test_truth.py", "-k", "serves_a_cpu and mine")


@pytest.mark.parametrize("chapter", ["Add a cause", "Add a scenario", "Add a backend of the attention"])
def test_the_steps_name_what_exists(chapter: str) -> None:
    named = re.findall(r"`((?:pytest_nsa|nsa|tests_cpu|docs)/[\w/.]+)`", "".join(steps(chapter)))
    assert len(named) >= 3
    new = {"pytest_nsa/diagnosis/rules/clocks.py", "docs/causes/clock_skew.md", "nsa/kernels/mine.py"}
    assert [name for name in named if name not in new and not (ROOT / name).exists()] == []


def test_the_registry_of_backends_is_what_the_configuration_names() -> None:
    import typing

    from nsa.config import ModelConfig
    from nsa.kernels.backends import BACKENDS

    names = typing.get_args(typing.get_type_hints(ModelConfig)["backend"])
    assert set(names) == {"auto", *BACKENDS}
