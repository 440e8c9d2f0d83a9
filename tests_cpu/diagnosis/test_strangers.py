"""What the commands write for a folder that somebody else has made or sent, and what they read of this machine for it."""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from nsa.trace import files as trace_files
from nsa.trace.board import Board  # imported here, as another user may not read this one's modules
from pytest_nsa.cli.main import main
from pytest_nsa.wire import files
from tests_cpu.faults.recorded import ROOT, unpack
from tests_cpu.strangers import NUMBER, needs_root, shared_folder, stranger

SECRET = "root-only-7711"


def make_run(root: Path, *, keep_sources: bool = True) -> tuple[Path, Path]:
    """Make a run of one recorded test; return it and the test's folder."""
    found = unpack("crashes_and_exits", root / "recorded")
    run = root / "test_engineer_20260101_000000"
    run.mkdir()
    test = run / "test_recorded"
    shutil.move(found[min(found)], test)
    shutil.rmtree(root / "recorded")
    if not keep_sources:
        (test / "source.jsonl").unlink()
    return run, test


def contents(folder: Path) -> dict[str, object]:
    """Return everything below a folder: what links lead to, what files hold, and when folders changed."""
    found: dict[str, object] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        kind: object = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
        found[str(path)] = kind, path.lstat().st_mtime_ns
    return found


def _writes(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing by its path, and follows a link that it finds there."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in ("write_text", "write_bytes", "touch"):
        return isinstance(call.func, ast.Attribute) and "'/proc/" not in ast.unparse(call)
    if name != "open":
        return False
    text = ast.unparse(call)
    if getattr(getattr(call.func, "value", None), "id", "") == "os":
        return any(flag in text for flag in ("O_CREAT", "O_WRONLY", "O_RDWR", "_FLAGS")) and not (
            "O_NOFOLLOW" in text or "_FLAGS" in text or "devnull" in text
        )
    mode = next((a.value for a in (*call.args, *(k.value for k in call.keywords if k.arg == "mode"))
                 if isinstance(a, ast.Constant) and isinstance(a.value, str)), "r")  # fmt: skip
    if not set(mode) & set("wax+"):
        return False
    return not any(opener in text for opener in ("open_to_append(", "closefd=False", "os.devnull", "memfd_create("))


def test_every_file_of_evidence_is_opened_without_following_links() -> None:
    modules = [*(ROOT / "pytest_nsa").rglob("*.py"), *(ROOT / "nsa" / "trace").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno} {ast.unparse(call)[:60]}"
        for path in modules if path.name != "testing.py"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _writes(call)
    ]  # fmt: skip
    assert found == []


@pytest.mark.parametrize("module", [files, trace_files])
def test_a_file_is_replaced_past_links_and_as_a_whole(tmp_path: Path, module: object) -> None:
    write = module.write_atomically  # type: ignore[attr-defined]
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("mine")
    folder.mkdir()
    (folder / "linked").symlink_to(victim)
    write(folder / "linked", "written")
    assert (folder / "linked").read_text() == "written"
    assert not (folder / "linked").is_symlink()
    (tmp_path / "way").symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        write(tmp_path / "way" / "file", "written")
    write(tmp_path / "way" / "file", "written", follow=True)
    (folder / "occupied").mkdir()
    with pytest.raises(IsADirectoryError):
        write(folder / "occupied", "written")
    assert victim.read_text() == "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["file", "linked", "occupied"]


@pytest.mark.parametrize("module", [files, trace_files])
def test_nothing_is_appended_to_what_a_link_leads_to(tmp_path: Path, module: object) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "linked").symlink_to(victim)
    with pytest.raises(OSError):
        module.open_to_append(tmp_path / "linked")  # type: ignore[attr-defined]
    assert victim.read_text() == "mine"


COMMANDS = (["diagnose", "--html"], ["report"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_links_that_are_planted_in_a_run_lead_nowhere(tmp_path: Path, command: list[str]) -> None:
    run, test = make_run(tmp_path)
    victims = tmp_path / "home"
    victims.mkdir()
    shutil.copytree(test, victims / "another")
    (victims / "rc").write_text("mine")
    names = ("perfetto.json", "verdict.json", "result.txt", "source.jsonl", "host.jsonl")
    for name in names:
        (test / name).unlink(missing_ok=True)
        (test / name).symlink_to(victims / "rc")
    for name in (
        "report.html",
        "SUMMARY.md",
        "decision.json",
        "env.json",
        "run.json",
        "all_missing_params.txt",
        ".in_use",
    ):
        (run / name).symlink_to(victims / "rc")
    for name in (*names, "report.html", "SUMMARY.md", "run.json"):  # as earlier versions named them
        for folder in (run, test):
            (folder / f".{name}.{os.getpid()}.partial").symlink_to(victims / "rc")
    (run / "linked").symlink_to(victims / "another")
    verdict = {
        "schema": 1,
        "nodeid": "t.py::test_x",
        "outcome": "FAIL",
        "cause": "unknown",
        "ranks": [],
        "world_size": 2,
    }
    lines = [
        json.dumps({"folder": name, **verdict, "nodeid": name}) for name in ("linked", "..", "../home", str(victims))
    ]
    (run / "verdicts.jsonl").write_text("\n".join(lines) + "\n")
    before = contents(victims)
    assert main([*command, str(run)]) in (0, 1)
    assert contents(victims) == before
    assert (run / "report.html").is_file()
    assert not (run / "report.html").is_symlink()


def give_away(*folders: Path) -> None:
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NUMBER, NUMBER, follow_symlinks=False)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@needs_root
@pytest.mark.parametrize("command", [*COMMANDS, ["diagnose"]], ids=" ".join)
def test_nothing_is_written_into_another_user_s_folder(shared: Path, command: list[str]) -> None:
    run, _ = make_run(shared, keep_sources=False)
    give_away(run)
    before = contents(run)
    assert main([*command, str(run)]) == (1 if command == ["diagnose"] else 2)
    assert contents(run) == before


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A module that this user alone can read."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    path = folder / "keys.py"
    path.write_text(f'def connect():\n    key = "{SECRET}"\n    return key\n')
    path.chmod(0o600)
    return path


def name_source(test: Path, file: Path, **job: str) -> None:
    """Have the evidence of a test name a line of a file, and its job claim to lie elsewhere."""
    stacks = f'Current thread 0x0000000000000001 (most recent call first):\n  File "{file}", line 2 in connect\n'
    (test / "rank0" / "stacks.txt").write_text(stacks)
    told = json.loads((test / "job.json").read_text())
    (test / "job.json").write_text(json.dumps({**told, **job}))


def sources_in(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("source.jsonl"))


@pytest.mark.parametrize("command", [["diagnose"], *COMMANDS], ids=" ".join)
def test_a_folder_that_was_made_elsewhere_gets_no_sources_of_this_machine(
    tmp_path: Path, private: Path, command: list[str]
) -> None:
    run, test = make_run(tmp_path, keep_sources=False)
    claims = (
        {"root": str(private.parent), "folder": "/home/them/artifacts/test"},
        {"root": "/", "folder": str(test)},  # where homes lie, and no project
        {"root": str(run), "folder": str(test)},  # the file is not below it
    )
    for claim in claims:
        name_source(test, private, **claim)
        (run / "verdicts.jsonl").unlink(missing_ok=True)
        assert main([*command, str(run)]) in (0, 1)
        assert SECRET not in "".join(
            path.read_text() for path in (*run.rglob("source.jsonl"), *run.rglob("report.html"))
        )
    (run / "verdicts.jsonl").unlink(missing_ok=True)
    main([*command, str(run), "--sources"])
    assert SECRET in sources_in(run)


def test_a_folder_that_was_made_here_gets_the_sources_below_its_root(tmp_path: Path, private: Path) -> None:
    run, test = make_run(tmp_path, keep_sources=False)
    name_source(test, private, root=str(private.parent), folder=str(test))
    main(["diagnose", str(run)])
    assert SECRET in sources_in(run)


@needs_root
@pytest.mark.parametrize("options", [[], ["--sources"]], ids=["", "--sources"])
def test_another_user_s_folder_gets_no_sources_even_on_request(shared: Path, private: Path, options: list[str]) -> None:
    run, test = make_run(shared, keep_sources=False)
    name_source(test, private, root=str(private.parent), folder=str(test))
    give_away(run)
    before = contents(run)
    main(["diagnose", str(run), *options])
    assert contents(run) == before


def _stalled_training(folder: Path, named: Path) -> Board:
    """Be the one process of a training that stalls, in evidence that names a file; return what it has mapped."""
    folder.mkdir()
    job = {
        "schema": 1, "nodeid": "theirs", "folder": str(folder), "root": str(named.parent), "world_size": 1, "backend": "",
        "created": time.time(),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "rank0").mkdir()
    board = Board(folder / "rank0" / "board.bin", 0, 1)
    board.phase("body")
    stacks = f'Current thread 0x0000000000000001 (most recent call first):\n  File "{named}", line 2 in connect\n'
    told = {"schema": 1, "time": time.time() + 1e6, "since": time.time(), "stacks": stacks}
    (folder / "rank0" / "stall.json").write_text(json.dumps(told))
    return board


@pytest.mark.parametrize("user", [os.getuid(), pytest.param(NUMBER, marks=needs_root)], ids=["own", "another"])
def test_only_one_s_own_processes_may_name_sources_when_they_are_watched(
    shared: Path, private: Path, user: int
) -> None:
    shared.chmod(0o777)
    run = shared / "run"

    def train(out: IO[str]) -> None:
        board = _stalled_training(run, private)
        out.write(f"{os.getpid()} {board.phase_name}\n")
        time.sleep(1000)

    with stranger(train, user) as told:
        pid = told.readline().split()[0]
        before = contents(run)
        command = [sys.executable, "-m", "pytest_nsa", "watch", pid, "--once"]
        done = subprocess.run(command, text=True, capture_output=True, timeout=100, check=False)
        assert done.stdout.startswith("rank 0  step 0  body  still for "), done
        if user == os.getuid():
            assert SECRET in sources_in(run)
            assert (run / "host.jsonl").exists()
        else:
            assert contents(run) == before
