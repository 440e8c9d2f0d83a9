"""What a user does at the terminal: -s, --pdb and breakpoint() reach the ranks; a flood of output is cut."""

import subprocess
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, run_example
from tests_cpu.warm import WarmPython


def debug(warm: WarmPython, pytester: pytest.Pytester, source: str, typed: str, *arguments: str) -> str:
    """Return the terminal's text when the user types ``typed``."""
    (pytester.path / "test_example.py").write_text(HEADER + source)
    command = ("-m", "pytest", "-p", "no:cacheprovider", *arguments)
    return warm.call(*command, typed=typed, stderr=subprocess.STDOUT, cwd=pytester.path).stdout


FAILS = """
@pytest.mark.timeout(10)
def test_fails(group):
    secret = 40 + group.rank
    dist.barrier()
    assert group.rank != 1

def test_after(group): dist.barrier()
"""


@pytest.mark.parametrize(
    ("typed", "options", "shown", "hidden"),
    [
        (
            "p secret\nw\nc\n",
            (),
            ("(Pdb, rank 1) 41", "assert group.rank != 1", "1 failed, 1 passed", "FAIL: rank 1 of 2, assertion"),
            "(Pdb, rank 0)",
        ),
        ("", ("--ranks-pdb-rank=0",), ("1 failed, 1 passed",), "is in the debugger"),
        ("q\n", (), ("Exit: Quitting debugger",), "1 passed"),
    ],
    ids=["the rank that failed", "another rank", "quitting ends the session"],
)
def test_pdb(
    warm: WarmPython,
    pytester: pytest.Pytester,
    typed: str,
    options: tuple[str, ...],
    shown: tuple[str, ...],
    hidden: str,
) -> None:
    text = debug(warm, pytester, FAILS, typed, "--pdb", *options)
    assert [part for part in shown if part not in text] == []
    assert hidden not in text
    assert text.count("a rank is in the debugger") == (not options)


BREAKS = """
@pytest.mark.timeout(6)
def test_breaks(group):
    value = 70 + group.rank
    if group.rank == 0:
        breakpoint()
    else:
        pytest.set_trace()
    total = torch.tensor(value)
    dist.all_reduce(total)
    assert total == 99
"""


def test_a_rank_that_no_test_has_is_refused(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "@world_size(2)\ndef test_x(group): pass", "--pdb", "--ranks-pdb-rank=7")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--ranks-pdb-rank 7: no test has such a rank: the largest runs on 2, from 0 on" in result.stderr


@pytest.mark.parametrize(
    ("chosen", "seen", "total"), [pytest.param((), 70, 99, marks=pytest.mark.slow), (("--ranks-pdb-rank=1",), 71, 99)]
)
def test_breakpoint_lends_the_terminal_to_one_rank_and_no_limit_runs(
    warm: WarmPython, pytester: pytest.Pytester, chosen: tuple[str, ...], seen: int, total: int
) -> None:
    # The user is at the prompt for longer than the test's whole time.
    typed = f"p value\nimport time; time.sleep(7)\nvalue = {total - 141 + seen}\nn\nn\nc\n"
    text = debug(warm, pytester, BREAKS, typed, *chosen)
    rank = seen - 70
    assert f"(Pdb, rank {rank}) {seen}" in text
    assert f"(Pdb, rank {1 - rank})" not in text
    assert "1 passed" in text


@pytest.mark.slow
def test_breakpoint_on_a_worker_is_refused_with_the_reason(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, BREAKS, "-n1", "-p", "xdist")
    assert result.outcomes == {"failed": 1}
    assert "this rank has no terminal, as its host is an xdist worker; run without -n" in result.stdout


def test_s_shows_each_rank_s_lines_as_they_come(warm: WarmPython, pytester: pytest.Pytester, tmp_path: Path) -> None:
    source = f"""
from pathlib import Path
def test_it(group):
    print("hello from", group.rank)
    os.write(2, b"and not from Python\\n")
    while not Path({str(tmp_path / "go")!r}).exists():
        time.sleep(0.01)
    print("no line end", end="")
"""
    (pytester.path / "test_example.py").write_text(HEADER + source)
    run = warm.popen("-m", "pytest", "-p", "no:cacheprovider", "-s", "-rP", stdout=subprocess.PIPE, cwd=pytester.path)
    seen = set()
    while len(seen) < 4:  # while the test still runs
        line = run.stdout.readline()
        assert line
        seen |= {line for start in ("[rank 0]", "[rank 1]") if line.startswith(start)}
    (tmp_path / "go").touch()
    rest = run.communicate(timeout=60)[0]
    assert seen == {f"[rank {r}] {text}\n" for r in (0, 1) for text in (f"hello from {r}", "and not from Python")}
    assert "[rank 0] no line end\n" in rest
    assert "Captured output of rank" not in rest, "the report does not repeat what was shown"
    assert "1 passed" in rest


def test_a_flood_of_output_is_cut_and_that_is_reported(pytester: pytest.Pytester) -> None:
    source = """
def test_floods(group):
    print("this is the head")
    if group.rank == 1:
        line = b"x" * (1 << 20) + b"\\n"
        for _ in range(1024):
            os.write(1, line)
    print("this is the tail")
    assert group.rank != 1
"""
    result = run_example(pytester, source, "-o", "ranks_output_limit=8")
    assert result.outcomes == {"failed": 1}
    output = result.folder("test_floods") / "rank1" / "output.log"
    assert output.stat().st_size < 9 << 20
    text = output.read_text()
    assert text.startswith("this is the head\n")
    assert text.rstrip().endswith("this is the tail")
    assert "bytes omitted here: ranks_output_limit keeps 8388608 bytes per rank" in text
    assert "this is the tail" in result.stdout
    assert len(result.stdout) < 100_000
