"""Folders and files of a run, also on a disk that is read-only, full or fills up, or with a limit on files."""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from nsa.trace.board import Board
from pytest_nsa.cli.main import main
from pytest_nsa.session.folders import BOARD, RunFolder, safe_name
from pytest_nsa.settings import resolve
from pytest_nsa.testing import HEADER, run_example
from tests_cpu.namespaces import MOUNT, in_namespace
from tests_cpu.warm import WarmPython

IDS = (
    "a/b.py::test[x-/etc/passwd]", "../../up.py::t", "t.py::t[" + "x" * 500 + "]", "t.py::t[ü\n\0]", "::", ".", "..", "",
    "t.py::a[1]", "t.py::a[1 ]", "t.py::a(1)", "t.py::a-1-",
)  # fmt: skip


def test_names_from_ids_are_safe_and_differ() -> None:
    names = [safe_name(nodeid) for nodeid in IDS]
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}", name)] == []
    assert len(set(names)) == len(IDS)


def test_two_runs_in_one_second_are_two_folders_and_one_called_latest_is_left_alone(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.path != second.path
    assert (tmp_path / "latest").resolve() == second.path
    (tmp_path / "other" / "latest").mkdir(parents=True)
    assert RunFolder(tmp_path / "other").path.is_dir()
    assert not (tmp_path / "other" / "latest").is_symlink()


def test_every_line_of_a_run_is_json_whatever_the_numbers(pytester: pytest.Pytester) -> None:
    """A host fixture, a recorded property and the norms of parameters are NaN or infinite; the verdict still names the NaN."""
    source = """
import math
from pytest_nsa import check_divergence, host_fixture

@host_fixture(scope="session")
def limit():
    return math.inf

@check_divergence
def test_a(ddp, limit, record_property):
    assert limit == math.inf
    record_property("loss", math.nan)
    model = ddp.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
    result = run_example(pytester, source, "--junitxml=report.xml")
    assert result.verdicts["test_a"].cause == "nan_loss"
    run = (pytester.path / "artifacts" / "latest").resolve()
    read: set[str] = set()
    for path in run.rglob("*.json*"):
        parts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        for part in parts:
            json.loads(part, parse_constant=lambda name, path=path: pytest.fail(f"{path.name} has {name}"))
        read.add(path.name)
    assert read >= {"job.json", "verdict.json", "reports.jsonl", "checksums.jsonl", "events.jsonl", "verdicts.jsonl"}
    assert '"inf"' in next(run.rglob("rank0/checksums.jsonl")).read_text()
    assert '<property name="loss" value="nan"' in (pytester.path / "report.xml").read_text()


def test_a_run_leaves_what_the_plan_names(pytester: pytest.Pytester) -> None:
    source = """
@scenario("one")
@trace_kinds("grads", "ddp_buckets")
def test_a(ddp, trace):
    model = ddp.wrap(torch.nn.Linear(2, 2))
    with trace(model):
        model(torch.ones(1, 2))[..., 0].sum().backward()

@scenario("two")
@trace_kinds("grads")
@world_size(1)
def test_b(group, trace):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with trace(model):
        model[0](torch.ones(1, 2)).sum().backward()
    assert trace.missing_gradients() == []

@scenario("three")
@pytest.mark.xfail
def test_c(group): assert group.rank == 2

def test_leaves_nothing(group): pass

def test_leaves_files(group, artifacts): (artifacts / f"{group.rank}.txt").touch()
"""
    result = run_example(pytester, source, "--ranks-artifacts", "evidence")
    run = (pytester.path / "evidence" / "latest").resolve()
    assert re.fullmatch(r"run_\d{8}_\d{6}", run.name)
    assert {p.name for p in run.iterdir()} >= {
        "test_execution.log", "SUMMARY.md", "report.html", "env.json", "all_missing_params.txt", "ddp_buckets.txt",
        "verdicts.jsonl", "one", "two",
    }  # fmt: skip
    assert {p.name for p in (run / "one").iterdir()} >= {
        "output.log", "traces.log", "result.txt", "verdict.json", "heartbeat_rank0.jsonl", "heartbeat_rank1.jsonl",
    }  # fmt: skip
    assert (run / "one" / "result.txt").read_text() == "PASS\n"
    assert (run / "two" / "result.txt").read_text() == "FAIL\n"
    assert (run / "three" / "result.txt").read_text() == "XFAIL\n"
    assert (run / "all_missing_params.txt").read_text() == "two 1.weight rank=0\ntwo 1.bias rank=0\n"
    assert "one [DDP] rank=1 bucket_elems=6 dtype=torch.float32" in (run / "ddp_buckets.txt").read_text()
    assert "[rank 1] [GRAD-TRACE] after_backward_step1 arrived=2 missing=0" in (run / "one" / "output.log").read_text()
    assert "FAIL two" in (run / "test_execution.log").read_text()
    assert result.outcomes == {"passed": 3, "failed": 1, "xfailed": 1}
    (left,) = {path.name for path in run.iterdir() if path.is_dir()} - {"one", "two", "three"}
    assert {path.name for path in (run / left).glob("*.txt")} == {"0.txt", "1.txt", "result.txt"}
    assert len({json.loads(line)["nodeid"] for line in (run / "verdicts.jsonl").read_text().splitlines()}) == 5


def test_no_control_character_and_no_markup_of_a_test_s_reaches_the_reports(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\\x1b]0;owned\\x07<img src=x onerror=alert(1)> [click](http://x) `code` | cell \\u202e"
    result = run_example(
        pytester,
        f"""
@pytest.mark.parametrize("x", ["{hostile}"], ids=["<b>a|b</b>"])
def test_it(group, x):
    print(x)
    raise ValueError(x)
""",
    )
    summary, page = ((result.run / name).read_text() for name in ("SUMMARY.md", "report.html"))
    for text in (result.stdout, summary, page):
        assert "\x1b]0;" not in text.replace("\\x1b", "")
        assert "\x07" not in text
        assert "\u202e" not in text
    for tag in ("<img", "<b>a"):
        assert tag not in page
        assert tag not in summary
    assert "](http://x)" not in summary
    capsys.readouterr()
    assert main(["diagnose", str(result.run)]) == 1
    said = capsys.readouterr().out
    assert "\x1b]0;" not in said
    assert "\\x1b]0;owned" in said


@pytest.mark.parametrize(
    "lists", ["--collect-only", "--fixtures", "--fixtures-per-test", "--markers", "--setup-plan", "--setup-only"]
)
def test_what_only_lists_writes_nothing(pytester: pytest.Pytester, lists: str) -> None:
    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass", lists)
    assert result.returncode == 0
    assert not (pytester.path / "artifacts").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((f"--ranks-bisect={value}", f" {value}: must be NAME=A,B,...") for value in ("rate", "rate=", "1=2", "=a")),
        ("artifacts_dir=", " '': is the tests' root folder; give a folder for evidence alone"),
        ("ranks_artifacts_keep=few", "= 'few': must be a whole number of runs (0 keeps all)"),
        ("ranks_ahead=maybe", ": invalid truth value 'maybe': must be true or false"),
        ("ranks_bisect_env=FOO", ": 'FOO': must be NAME=VALUE"),
        ("ranks_bisect_env=RANK=3", ": RANK: the plugin sets it; remove it"),
        ("ranks_timeout=soon", "= 'soon'"),
        ("ranks_hang_after=-1", "= '-1'"),
        ("ranks_hang_after=400", "= 400: must be b"),
        ("ranks_start_timeout=0", "= '0'"),
        ("ranks_rerun=some", "= 'some': must be auto, off or all"),
        ("ranks_host_plugins=!", ": '!': must be the name of a plugin, as in allure_pytest, or !name"),
        ("ranks_host_plugins=acts\n!acts", ": has both acts and !acts; remove one of them"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(pytester: pytest.Pytester, given: str, message: str) -> None:
    name, _, _ = given.partition("=")
    is_option = given.startswith("--")
    with pytest.raises(pytest.UsageError) as refused:
        resolve(pytester.parseconfig(*(() if is_option else ("-o",)), given))
    assert f"{name}{message}" in str(refused.value).replace(f"ini {name} = ", f"ini {name}= ")
    assert is_option or f"ini {name}" in str(refused.value)


def test_git_ignores_only_a_folder_that_was_empty_and_no_other_user_reads_a_run(pytester: pytest.Pytester) -> None:
    source = "@world_size(1)\ndef test_a(group): assert False"
    pytester.mkdir("mine").joinpath("notes.txt").touch()
    run_example(pytester, source, "--ranks-artifacts=mine")
    assert not (pytester.path / "mine" / ".gitignore").exists()
    assert (pytester.path / "mine" / "latest" / ".gitignore").read_text() == "*\n"
    result = run_example(pytester, source)
    assert stat.S_IMODE(result.run.stat().st_mode) == 0o700
    assert (pytester.path / "artifacts" / ".gitignore").read_text() == "*\n"


@pytest.mark.own_python
def test_what_c_has_printed_is_kept_when_the_rank_is_killed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL prints by C's stdio, which keeps 4 KiB to itself where its output is a file."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    source = """
import ctypes

def test_killed(group):
    if group.rank == 1:
        ctypes.CDLL(None).printf(b"NCCL INFO from C\\n")
        os.kill(os.getpid(), 9)
    dist.barrier()
"""
    result = run_example(pytester, source)
    assert "NCCL INFO from C" in (result.folder("test_killed") / "rank1" / "output.log").read_text()


def test_what_is_missing_on_some_ranks_is_in_every_list_with_the_ranks(pytester: pytest.Pytester) -> None:
    """One parameter is missing on all three ranks in step 1, another on ranks 1 and 2 in step 2; nothing but the trace sees it."""
    source = """
@scenario("parts")
@trace_kinds("grads", "module_bwd")
@world_size(3)
def test_a(group, trace):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(3)])
    for parts in ((0, 1), (0, 1, 2) if group.rank == 0 else (0, 2)):
        with trace(model):
            sum(model[part](torch.ones(1, 2, requires_grad=True)).sum() for part in parts).backward()
"""
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 1}
    lines = (result.run / "parts" / "traces.log").read_text().splitlines()
    assert [line for line in lines if "[GRAD-TRACE]" in line or "MISSING" in line] == [
        "[GRAD-TRACE] after_backward_step1 arrived=2 missing=1",
        "  - MISSING: 2.weight",
        "[rank 0] [GRAD-TRACE] after_backward_step2 arrived=3 missing=0",
        "[rank 1,2] [GRAD-TRACE] after_backward_step2 arrived=2 missing=1",
        "[rank 1,2]   - MISSING: 1.weight",
    ]
    assert "[rank 1,2]   - NOT REACHED: 1" in lines
    assert (result.run / "all_missing_params.txt").read_text() == "parts 2.weight rank=0-2\nparts 1.weight rank=1,2\n"
    assert result.verdicts["test_a"].parameters_missing == ("2.weight", "1.weight")
    row = next(line for line in (result.run / "SUMMARY.md").read_text().splitlines() if line.startswith("| [parts]"))
    assert row.split(" | ")[5] == "2"


SOURCE = (
    HEADER
    + """
import errno, pathlib

def test_pass(group): dist.barrier()

def test_fill():
    if "FILL" in os.environ:
        with pytest.raises(OSError):
            with open(pathlib.Path("artifacts", "filler"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))

def test_after(group): dist.barrier()

@pytest.mark.timeout(20)
def test_fail(group):
    assert group.rank == 0, "rank 1 is wrong"
"""
)


def run_on_a_small_disk(
    warm: WarmPython, folder: Path, size: str, *options: str, fill: bool = False
) -> tuple[str, Path]:
    """Run SOURCE with ``artifacts`` on a disk of its own; return the output, and the folder of evidence without room there."""
    (folder / "test_example.py").write_text(SOURCE)
    (folder / "artifacts").mkdir()
    (folder / "tmp").mkdir()
    mount = f"mount -t tmpfs -o size={size} none artifacts"
    session = ("pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--basetemp", str(folder / "base"))
    variables = {"TMPDIR": str(folder / "tmp"), **({"FILL": "1"} if fill else {})}
    done = warm.call(*in_namespace(MOUNT, mount, *session, *options), cwd=folder, env={**os.environ, **variables})
    print(done.stdout, done.stderr)
    return done.stdout + done.stderr, next(folder.glob("tmp/pytest-nsa-*")) / "artifacts" / "latest"


def is_whole(run: Path) -> None:
    """Assert that a run's reports are there, and the verdict of the test that failed."""
    assert "rank 1 is wrong" in (run / "SUMMARY.md").read_text()
    assert (run / "report.html").is_file()
    assert list(run.glob("*test_fail*/verdict.json"))


def test_the_space_that_is_set_aside_holds_a_board(tmp_path: Path) -> None:
    """Else a rank that starts when the disk has become full ends."""
    Board(tmp_path / "board.bin")
    assert (tmp_path / "board.bin").stat().st_size <= BOARD


def test_a_full_disk(warm: WarmPython, tmp_path: Path) -> None:
    output, spare = run_on_a_small_disk(warm, tmp_path, "600k")
    assert "1 failed, 3 passed" in output, output
    assert output.count("artifacts: No space left on device: evidence goes to") == 1
    assert "Traceback" not in output.replace('Traceback (most recent call last):\n  File "' + str(tmp_path), "")
    is_whole(spare)


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2", "--dist", "loadgroup"), marks=pytest.mark.slow)])
def test_a_disk_that_fills_up(warm: WarmPython, tmp_path: Path, options: tuple[str, ...]) -> None:
    output, _ = run_on_a_small_disk(warm, tmp_path, "12m", *options, fill=True)
    assert "1 failed, 3 passed" in output, output
    assert output.count("No space left on device: evidence of further tests goes to") == 1
    (found,) = tmp_path.glob("tmp/pytest-nsa-*/artifacts/*/*test_fail*/verdict.json")  # on another disk
    assert "rank 1 is wrong" in found.read_text()


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]) * 1024,) * 2)  # as the shell's ulimit -f
sys.argv[1:] = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q"]
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (100, "ulimit -f limits files to 100 KiB: what ranks write beyond that is dropped"),
        (20, "ERROR: ulimit -f limits files to 20 KiB, and a rank's evidence needs 48: raise it"),
    ],
)
def test_a_limit_on_files(warm: WarmPython, tmp_path: Path, limit: int, says: str) -> None:
    (tmp_path / "test_example.py").write_text(SOURCE)
    done = warm.call("-c", LIMITED, str(limit), cwd=tmp_path)
    output = done.stdout + done.stderr
    assert output.count(says) == 1, output
    if limit == 100:
        assert "1 failed, 3 passed" in output
        is_whole(tmp_path / "artifacts" / "latest")
