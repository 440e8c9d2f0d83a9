"""Which folders are runs, and which of them are deleted: none that is damaged, another user's, or has something mounted in it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.report.runs import list_runs
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.system.folder_removal import has_mounts, remove_tree
from pytest_nsa.testing import run_example
from tests_cpu.strangers import NUMBER, needs_root, shared_folder

ENV = {"schema": 1, "python": "3.11", "system": "Linux", "variables": {}}
END = {"schema": 1, "time": 0.0, "failed": 0, "interrupted": False}


def make_run(root: Path, number: int, env: dict[str, Any] | None = None, **end: Any) -> Path:
    run = root / f"test_engineer_20260101_{number:06}"
    run.mkdir(parents=True)
    (run / "env.json").write_text(json.dumps(ENV if env is None else env))
    (run / "run.json").write_text(json.dumps({**END, "time": float(number), **end}))
    return run


def end_of(run: Path, text: str) -> None:
    (run / "run.json").write_text(text)


TIMES = ["1" + "0" * 400, "NaN", "1e300", "1e999", "-1", '"now"', "null", "true", "in ten days"]


@pytest.mark.parametrize("at", TIMES, ids=lambda text: text[:12])
def test_a_run_with_a_time_that_cannot_be_is_left_alone_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    made = [make_run(tmp_path, number) for number in (1, 2, 3)]
    odd = make_run(tmp_path, 4)
    at = str(time.time() + 10 * 86400) if at == "in ten days" else at
    end_of(odd, f'{{"schema": 1, "time": {at}, "failed": 0, "interrupted": false}}')
    assert main(["clean", "--keep", "2", "--keep-failed", "0", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(made[0])]
    assert err == f"left alone: {odd.name}: its run.json is not as this version writes it\n"
    assert [path.is_dir() for path in (*made, odd)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("env", "end"),
    [
        ({"schema": 1}, {}),
        ({"schema": 2, "name": "an experiment"}, {}),
        (ENV, {"schema": 2}),
        (ENV, {"failed": "none"}),
        (ENV, {"failed": -1}),
        (ENV, {"interrupted": 0}),
    ],
)
def test_what_another_program_may_have_written_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: dict[str, Any], end: dict[str, Any]
) -> None:
    foreign = make_run(tmp_path, 1, env, **end)
    assert main(["clean", "--keep", "0", "--keep-failed", "0", str(tmp_path)]) == 0
    assert foreign.is_dir()
    assert capsys.readouterr().err.startswith("left alone: ")


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "nested"])
def test_a_run_s_file_that_is_none_is_left_alone(tmp_path: Path, kind: str) -> None:
    odd, good = make_run(tmp_path, 2), make_run(tmp_path, 1)
    path = odd / "run.json"
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
    assert [run.path for run in list_runs(tmp_path)] == [good]


def test_a_damaged_run_ends_no_session(pytester: pytest.Pytester) -> None:
    root = pytester.path / "artifacts"
    odd = make_run(root, 1)
    end_of(odd, f'{{"schema": 1, "time": {TIMES[0]}}}')
    result = run_example(pytester, "@world_size(1)\ndef test_it(group): assert False")
    assert result.outcomes == {"failed": 1}
    assert result.run is not None
    assert (result.run / "SUMMARY.md").is_file()
    assert f"artifacts: left alone: {odd.name}: its run.json is not as this version writes it" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert odd.is_dir()


@needs_root
def test_another_user_s_runs_are_not_deleted_and_push_out_none_of_ours() -> None:
    with shared_folder(0o777) as root:
        ours = [make_run(root, number) for number in (1, 2)]
        theirs = [make_run(root, number) for number in (3, 4, 5)]
        for run in theirs:
            os.chown(run, NUMBER, NUMBER)
        assert main(["clean", "--keep", "2", "--keep-failed", "0", str(root)]) == 0
        assert all(run.is_dir() for run in (*ours, *theirs))
        assert main(["clean", "--keep", "0", "--keep-failed", "0", str(root)]) == 0
        assert [run.is_dir() for run in (*ours, *theirs)] == [False, False, True, True, True]


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_run_s_folder_that_another_user_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with shared_folder(0o1777) as root:
        (root / "trap").mkdir()
        if kind == "link":
            (root / "run").symlink_to("trap")
        else:
            (root / "trap").rename(root / "run")
        (root / "run").chmod(0o777)
        os.chown(root / "run", NUMBER, NUMBER, follow_symlinks=False)
        folder = RunFolder(root, "run")
        folder.test_folder("test_x", [0])
        assert folder.path == tmp_path / f"pytest-nsa-{os.getuid()}" / "artifacts" / "run"
        assert [*(root / "run").iterdir()] == []
        assert "another user has made it: evidence goes to" in folder.notices()[0]
        assert RunFolder(root, "another").path == root / "another"
        assert not [*root.glob(".owner.*")]


def test_a_file_system_may_give_every_file_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: NUMBER)  # in place of a mount that does it
    runs = [make_run(tmp_path, number) for number in (1, 2)]
    assert main(["clean", "--keep", "1", "--keep-failed", "0", str(tmp_path)]) == 0
    assert [run.is_dir() for run in runs] == [False, True]
    assert RunFolder(tmp_path, runs[1].name).path == runs[1]


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


MOUNTS = """
import pathlib, subprocess, sys
from pytest_nsa.cli.main import main
root, source = map(pathlib.Path, sys.argv[1:3])
target = root / "test_engineer_20260101_000001" / "a mount"
target.mkdir()
subprocess.run(["mount", *sys.argv[3:], target], check=True)
(target / "mine").write_text("x")
main(["clean", "--keep", "0", "--keep-failed", "0", str(root)])
assert (target / "mine").read_text() == "x"
assert not (root / "test_engineer_20260101_000002").exists()
subprocess.run(["umount", target], check=True)
main(["clean", "--keep", "0", "--keep-failed", "0", str(root)])
assert not target.exists()
print("kept")
"""


@needs_root
@pytest.mark.parametrize("kind", ["bind", "another file system"])
def test_what_is_mounted_in_a_run_is_kept(tmp_path: Path, kind: str) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    root, source = tmp_path / "artifacts", tmp_path / "source"
    source.mkdir()
    for number in (1, 2):
        make_run(root, number)
    options = ["--bind", str(source)] if kind == "bind" else ["-t", "tmpfs", "none"]
    command = ["unshare", "-m", sys.executable, "-c", MOUNTS, str(root), str(source), *options]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.stdout.endswith("kept\n"), done
    assert (source / "mine").exists() == (kind == "bind")
    assert [path.name for path in root.iterdir()] == []


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tree"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    (folder / "a" / "link").symlink_to(tmp_path / "kept")
    yield folder
    assert (tmp_path / "kept" / "file").exists()


def test_a_tree_is_removed_and_links_in_it_are_not_followed(tree: Path) -> None:
    assert not has_mounts(tree)
    assert remove_tree(tree)
    assert not tree.exists()


def test_a_link_to_a_tree_is_not_followed(tree: Path) -> None:
    link = tree.parent / "way"
    link.symlink_to(tree)
    assert not remove_tree(link)
    assert (tree / "a" / "b" / "file").exists()
    assert not remove_tree(tree.parent / "nowhere")


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
