"""pytest's own features and third-party plugins do in ranks what they do elsewhere; snapshots that ranks would make are refused."""

import json
import sqlite3
from pathlib import Path

import coverage
import pytest

from pytest_nsa.testing import run_example

HYPOTHESIS = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=20)
@given(x=st.lists(st.integers(0, 1000), max_size=20))
def test_same_examples(group, artifacts, x):
    with (artifacts / f"examples{group.rank}").open("a") as file:
        file.write(f"{x}\\n")
    total = torch.tensor(float(sum(x)))
    dist.all_reduce(total)
    assert total.item() == 2 * sum(x)

@given(x=st.integers(0, 1000))
def test_one_rank_fails_and_shrinks(group, x):
    total = torch.tensor(float(x))
    dist.all_reduce(total)
    assert group.rank == 0 or x < 37

@given(x=st.integers(0, 1000))
@pytest.mark.timeout(30)
def test_one_rank_fails_before_a_collective(group, x):
    assert group.rank == 0 or x < 37
    dist.all_reduce(torch.ones(1))
"""


def test_hypothesis_draws_the_same_examples_and_shrinks_in_step(pytester: pytest.Pytester) -> None:
    pytest.importorskip("hypothesis", reason="the extra 'test' has it")
    result = run_example(pytester, HYPOTHESIS, "-p", "hypothesispytest")
    assert result.outcomes == {"passed": 1, "failed": 2}
    folder = result.folder("test_same_examples")
    examples = [(folder / f"examples{rank}").read_text() for rank in (0, 1)]
    assert examples[0] == examples[1]
    assert len(set(examples[0].splitlines())) >= 10
    shrunk = result.verdicts["test_one_rank_fails_and_shrinks"]
    assert (shrunk.outcome, shrunk.cause, shrunk.ranks) == ("FAIL", "assertion", (1,))
    assert "x=37" in result.stdout
    early = result.verdicts["test_one_rank_fails_before_a_collective"]
    assert (early.outcome, early.cause, early.ranks) == ("FAIL", "rank_exception", (1,))
    assert early.reason.startswith("AssertionError: assert (1 == 0 or ")


COVERED = """
def on_ranks(rank):
    if rank == 1:
        return "one"
    return "zero"

def never():
    return "never"
"""


@pytest.mark.parametrize(
    "arguments", [(), *(pytest.param(some, marks=pytest.mark.slow) for some in (("-n1",), ("--ranks-launch=cold",)))]
)
def test_coverage_counts_what_ranks_run(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("pytest_cov", reason="the extra 'test' has it")
    (pytester.path / "covered.py").write_text(COVERED)
    source = "import covered\n@world_size(2)\ndef test_it(group): covered.on_ranks(group.rank)"
    result = run_example(pytester, source, "--cov=covered", "--cov-report=json", "-p", "xdist", *arguments)
    assert result.outcomes == {"passed": 1}
    report = json.loads((pytester.path / "coverage.json").read_text())
    assert report["files"]["covered.py"]["missing_lines"] == [8]
    assert not list(pytester.path.glob(".coverage.*"))
    sqlite3.connect(pytester.path / ".coverage").close()


def test_a_rerun_gets_fresh_ranks(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures", reason="the extra 'test' has it")
    source = f"""
from pathlib import Path
@pytest.mark.flaky(reruns=3)
def test_it(group):
    dist.barrier()
    tries = Path({str(tmp_path / "tries")!r})
    if group.rank == 0:
        with tries.open("a") as file:
            file.write(f"{{os.getpid()}}\\n")
        assert len(set(tries.read_text().split())) == 3
"""
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 1, "rerun": 2}


@pytest.mark.parametrize("arguments", [(), pytest.param(("-n2",), marks=pytest.mark.slow)])
def test_randomly_gives_all_ranks_one_seed(pytester: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    pytest.importorskip("pytest_randomly", reason="the extra 'test' has it")
    source = """
import random
@pytest.mark.parametrize("n", range(4))
def test_it(group, n):
    mine = torch.tensor([random.random(), torch.rand(()).item()], dtype=torch.float64)
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    assert torch.equal(theirs[0], theirs[1])
"""
    result = run_example(pytester, source, "-p", "randomly", "-p", "xdist", *arguments)
    assert result.outcomes == {"passed": 4}
    assert "--randomly-seed=" in result.stdout


EVERYTHING = """
import logging

@pytest.fixture(scope="session", params=["a", "b"])
def session_wide(request):
    yield request.param

@pytest.fixture(scope="module")
def module_wide(session_wide): return session_wide + "m"

@pytest.fixture
def doubled(request): return request.param * 2

@pytest.mark.parametrize("doubled", [1, 2], indirect=True)
def test_fixtures(group, module_wide, doubled, monkeypatch, tmp_path, rank_tmp_path):
    assert module_wide in ("am", "bm") and doubled in (2, 4)
    monkeypatch.setenv("X", str(group.rank))
    (rank_tmp_path / "mine").write_text(os.environ["X"])
    dist.barrier()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0", "rank1"]
    assert (tmp_path / f"rank{1 - group.rank}" / "mine").read_text() == str(1 - group.rank)

def test_logs(group, caplog, capsys):
    logging.getLogger("x").warning("logged by %d", group.rank)
    assert caplog.messages == [f"logged by {group.rank}"]

def test_capfd(group, capfd):
    os.write(1, b"to the descriptor")
    assert capfd.readouterr().out == "to the descriptor"

@world_size(4)
def test_group_of_errors(group):
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])

def test_setup_fails_on_one(group, broken): pass

@pytest.fixture
def broken(group, artifacts):
    (artifacts / f"set_up{group.rank}").touch()
    if group.rank == 1:
        raise RuntimeError("no set-up here")
    yield
    (artifacts / f"torn_down{group.rank}").touch()

@pytest.fixture
def torn_down(group, artifacts):
    yield
    (artifacts / f"torn_down{group.rank}").touch()

def test_one_fails_and_both_are_torn_down(group, torn_down):
    assert group.rank == 0

def test_fail(group): pytest.fail("because", pytrace=False)

@pytest.fixture
def breaks_in_teardown():
    yield
    raise RuntimeError("after the xfail")

def test_xfail_hides_no_broken_teardown(group, breaks_in_teardown): pytest.xfail("known")
"""


def test_pytest_s_own_facilities(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, EVERYTHING)
    assert result.outcomes == {"passed": 6, "failed": 3, "xfailed": 1, "errors": 2}
    text = result.stdout
    assert "--- ranks 0-3 ---" in text  # the same failure, once
    assert text.count("| ValueError: one") == 1
    broken = result.verdicts["test_setup_fails_on_one"]
    assert (broken.cause, broken.ranks) == ("rank_exception", (1,))
    assert "no set-up here" in broken.reason
    folder = result.folder("test_one_fails_and_both_are_torn_down")
    assert sorted(p.name for p in folder.glob("torn_down*")) == ["torn_down0", "torn_down1"]
    assert "because" in result.verdicts["test_fail"].reason


HOSTED = """
@host_fixture(scope="session")
def corpus(tmp_path_factory, on_host_only):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "made").write_text(f"by {os.getpid()}")
    yield folder
    (folder / "made").unlink()

@host_fixture(scope="module")
def numbers(): return {"a": [1, 2]}

@pytest.fixture(scope="session")
def on_host_only():
    assert "RANK" not in os.environ
    return os.getpid()

@pytest.mark.parametrize("n", range(2))
def test_on_ranks(group, n, corpus, numbers, artifacts):
    assert numbers == {"a": [1, 2]}
    (artifacts / f"seen{group.rank}").write_text((corpus / "made").read_text())

def test_on_the_host(corpus, on_host_only):
    assert (corpus / "made").read_text() == f"by {os.getpid()}"

@host_fixture()
def model(): return torch.nn.Linear(1, 1)

def test_unfit(group, model): pass
"""


def test_a_host_fixture_is_made_once_for_all_ranks_and_tests(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, HOSTED)
    assert result.outcomes == {"passed": 3, "errors": 1}
    assert "host_fixture 'model': its value must be a Path, or what JSON can hold" in result.stdout
    assert len({path.read_text() for path in result.run.glob("*/seen*")}) == 1


def test_a_rank_s_lines_count_for_their_test_where_tests_are_measured_one_by_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(library="def value():\n    return 2\n\ndef other():\n    return 3\n")
    source = """
    import library
    def test_ranked(group): assert library.value() == 2
    def test_plain(): assert library.other() == 3
    """
    run_example(pytester, source, "--cov=library", "--cov-context=test", "--cov-report=")
    data = coverage.CoverageData(basename=str(pytester.path / ".coverage"))
    data.read()
    (lines,) = [data.contexts_by_lineno(path) for path in data.measured_files()]
    assert {number: [c.rpartition("::")[2] for c in contexts if c] for number, contexts in lines.items()} == {
        1: [], 4: [], 2: ["test_ranked|run"], 5: ["test_plain|run"],
    }  # fmt: skip


STORED = """\
# serializer version: 1
# name: test_plain
  dict({
    'a': 1,
  })
# ---
# name: test_ranked
  dict({
    'size': 2,
  })
# ---
"""
RANKED_AND_PLAIN = """
@pytest.fixture
def mine(snapshot): return snapshot

def test_ranked(group, mine): assert {"size": group.world_size} == mine

def test_plain(snapshot): assert {"a": 1} == snapshot
"""


@pytest.mark.parametrize("arguments", [(), ("--snapshot-update",)], ids=["compare", "update"])
def test_a_ranked_test_with_snapshots_is_refused_and_none_is_deleted(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("syrupy", reason="the extra 'test' has it")
    stored = pytester.mkdir("__snapshots__") / "test_example.ambr"
    stored.write_text(STORED)
    result = run_example(pytester, RANKED_AND_PLAIN, "-p", "syrupy", *arguments)
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "test_ranked" not in result.verdicts
    assert "takes syrupy's 'snapshot'" in result.stdout
    assert stored.read_text() == STORED


INLINE = """
from inline_snapshot import snapshot

def test_ranked(group): assert 5 == snapshot()

def test_has_its_value(group): assert 2 == snapshot(2)

def test_plain(): assert 6 == snapshot()
"""


def test_inline_snapshots_without_a_value_are_refused(pytester: pytest.Pytester) -> None:
    pytest.importorskip("inline_snapshot", reason="the extra 'test' has it")
    result = run_example(pytester, INLINE, "-p", "inline_snapshot", "--inline-snapshot=create")
    assert result.verdicts["test_ranked"].reason.startswith("Failed: inline-snapshot: a snapshot() has no value")
    assert result.verdicts["test_ranked"].where.startswith("test_example.py:8 ")
    assert "test_has_its_value" not in result.verdicts or not result.verdicts["test_has_its_value"].failed
    source = (pytester.path / "test_example.py").read_text()
    assert "5 == snapshot()" in source
    assert "6 == snapshot(6)" in source
    # The error is the plain test's: inline-snapshot has just created its value.
    assert result.outcomes == {"failed": 1, "passed": 2, "errors": 1}
