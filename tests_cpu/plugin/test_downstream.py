"""The built wheel in a user's repository, and the README's first example: the user's tests, our verdict."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from pytest_nsa.testing import run_folder

ROOT = Path(__file__).resolve().parents[2]


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, text=True, capture_output=True, timeout=150)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a fresh environment with the wheel; it borrows torch and pytest from ours, to save gigabytes."""
    folder = tmp_path_factory.mktemp("venv")
    done = call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("pytest_nsa-*.whl")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    done = call(sys.executable, *install, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    (Path(purelib) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_is_what_runs(python: Path, tmp_path: Path) -> None:
    code = "import pytest_nsa, nsa; print(pytest_nsa.__file__); print(nsa.__file__)"
    files = call(python, "-c", code, cwd=tmp_path).stdout.split()
    assert len(files) == 2
    assert all(Path(f).is_relative_to(python.parents[1]) for f in files)


def test_their_hanging_test_gets_its_verdict(python: Path, tmp_path: Path) -> None:
    repository = tmp_path / "downstream"
    shutil.copytree(ROOT / "examples" / "downstream", repository, ignore=shutil.ignore_patterns("artifacts", "*cache*"))
    done = call(python, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", cwd=repository)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    run = repository / "artifacts" / "latest"
    lines = [json.loads(line) for line in (run / "verdicts.jsonl").read_text().splitlines()]
    # The second run adds to the verdict of the first.
    assert [line["outcome"] for line in lines] == ["PASS", "HANG", "HANG"]
    verdict = json.loads((run / lines[1]["folder"] / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"]) == ("skipped_collective", [1])  # it left the function early
    assert verdict["where"].startswith("small_transformer.py:")
    source = (repository / "small_transformer.py").read_text().splitlines()
    assert "if count == 0" in source[int(verdict["where"].split(":")[1].split()[0]) - 1]
    assert "rank 1" in (run / "SUMMARY.md").read_text().splitlines()[0]


def test_the_first_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    program, shown = re.findall(
        r"^```(?:python)?\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )[:2]
    (tmp_path / "test_epochs.py").write_text(program, encoding="utf-8")
    result = run_folder(tmp_path, "--ranks-rerun", "auto", "test_epochs.py")
    printed = result.stdout.splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
