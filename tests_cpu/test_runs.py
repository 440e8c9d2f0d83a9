"""Which folders are runs, and which of them are deleted: none that is damaged."""

import fcntl
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.report.runs import list_runs
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.testing import run_example

ENV = {"schema": 1, "python": "3.11", "system": "Linux", "variables": {}}
END = {"schema": 1, "time": 0.0, "failed": 0, "interrupted": False}


def make_run(root: Path, number: int, env: dict[str, Any] | None = None, **end: Any) -> Path:
    run = root / f"test_engineer_20260101_{number:06}"
    run.mkdir(parents=True)
    (run / "env.json").write_text(json.dumps(ENV if env is None else env))
    (run / "run.json").write_text(json.dumps({**END, "time": float(number), **end}))
    return run


ODD = {
    "another program's env.json": ({"schema": 2, "name": "an experiment"}, {}),
    "an env.json that lacks fields": ({"schema": 1}, {}),
    "another schema": (ENV, {"schema": 2}),
    "a number below 0": (ENV, {"failed": -1}),
    "a number that is no flag": (ENV, {"interrupted": 0}),
    "a time of 401 digits": (ENV, {"time": int("1" + "0" * 400)}),
    "no number": (ENV, {"time": float("nan")}),
    "a time in ten days": (ENV, {"time": time.time() + 10 * 86400}),
}


@pytest.mark.parametrize("kind", [*ODD, "folder", "link", "pipe", "nested"])
def test_what_another_program_may_have_written_is_no_run_and_stays(tmp_path: Path, kind: str) -> None:
    made = [make_run(tmp_path, number) for number in (1, 2)]
    env, end = ODD.get(kind, (ENV, {}))
    odd = make_run(tmp_path, 3, env, **end)
    path = odd / "run.json"
    if kind not in ODD:
        path.rename(tmp_path / "kept.json")
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "kept.json")
        case "pipe":
            os.mkfifo(path)
        case "nested":
            path.write_text("[" * 200_000)
    assert [run.path for run in list_runs(tmp_path)] == made[::-1]
    assert main(["clean", "--keep", "1", "--keep-failed", "0", str(tmp_path)]) == 0
    assert [run.is_dir() for run in (*made, odd)] == [False, True, True]


def test_old_runs_go_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "artifacts"
    made = [make_run(root, n, failed=int(n in (1, 3))) for n in range(1, 8)]
    made[4] = made[4].rename(root / "run_20260101_000005")  # of a repository without a plan
    unfinished = make_run(root, 0)
    (unfinished / "run.json").unlink()
    (root / "test_engineer_notes").mkdir()
    elsewhere = make_run(tmp_path / "elsewhere", 0)
    (root / "test_engineer_link").symlink_to(elsewhere)
    monkeypatch.chdir(tmp_path)
    clean = ["clean", "--keep", "2", "--keep-failed", "1"]
    with (made[1] / ".in_use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        for options, numbers in ((["--dry-run"], (5, 4, 2, 1)), ([], (5, 4, 1))):  # one is in use
            assert main([*clean, *options]) == 0
            assert capsys.readouterr().out.splitlines() == [f"artifacts/{made[n - 1].name}" for n in numbers]
    kept = {*(made[n - 1].name for n in (7, 6, 3, 2)), unfinished.name, "test_engineer_notes", "test_engineer_link"}
    assert {path.name for path in root.iterdir()} == kept
    assert elsewhere.is_dir()
    assert main(["clean", "nowhere"]) == 2


def test_a_session_keeps_as_many_runs_as_the_setting_names(pytester: pytest.Pytester) -> None:
    root = pytester.path / "artifacts"
    made = [make_run(root, n, failed=int(n == 1)) for n in range(1, 6)]
    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass", "-o", "ranks_artifacts_keep=3")
    assert result.outcomes == {"passed": 1}
    left = {path.name for path in root.iterdir() if not path.is_symlink() and path.is_dir()}
    assert left == {result.run.name, *(made[n - 1].name for n in (5, 4, 1))}


def test_other_users_cannot_write_into_the_folder_of_runs(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o777)
    before = os.umask(0)
    try:
        run = RunFolder(there / "new" / "artifacts").path
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (run, run.parent, run.parent.parent, there)]
    assert modes == [0o700, 0o755, 0o755, 0o777]


def test_what_a_killed_process_has_left_of_a_deletion_goes_with_the_next(tmp_path: Path) -> None:
    make_run(tmp_path, 1)
    left = tmp_path / ".test_engineer_20260101_000000.deadbeef.deleted"
    left.mkdir()
    (left / "file").write_text("x")
    main(["clean", "--keep", "0", "--keep-failed", "0", str(tmp_path)])
    assert [*tmp_path.iterdir()] == []


def test_names_of_folders_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "test_engineer_\x1b]0;owned\x07"
    make_run(tmp_path, 1).rename(made)
    assert main(["clean", "--keep", "0", "--keep-failed", "0", "--dry-run", str(tmp_path)]) == 0
    assert main(["report", str(made)]) == 2
    (made / "verdicts.jsonl").touch()
    assert main(["report", str(made)]) == 0
    assert main(["diagnose", str(made)]) == 2
    assert main(["compare", str(made), str(made / "no")]) == 2
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "\\x1b]0;owned" in out
