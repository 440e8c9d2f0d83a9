"""Snapshots that ranks compare with: syrupy's are kept by the host's session, inline-snapshot's are refused without a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
from pytest_nsa.testing import HEADER, ExampleResult, run_example
from tests_cpu.plugin.test_outer_launchers import slurm
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

LAUNCHES = [
    "auto",
    *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("clean", "cold")),
]
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
@world_size(2)
def test_ranked(group, snapshot):
    dist.barrier()
    assert {"size": group.world_size} == snapshot

def test_plain(snapshot): assert {"a": 1} == snapshot
"""


@pytest.fixture(autouse=True)
def _syrupy() -> None:
    pytest.importorskip("syrupy", reason="the extra 'test' has it")


def stored(pytester: pytest.Pytester) -> Path:
    """The file of the example's snapshots."""
    return pytester.path / "__snapshots__" / "test_example.ambr"


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> ExampleResult:
    return run_example(pytester, source, "-p", "syrupy", *arguments)


def store(pytester: pytest.Pytester, text: str) -> None:
    stored(pytester).parent.mkdir()
    stored(pytester).write_text(text)


@pytest.mark.parametrize("mode", LAUNCHES)
def test_what_ranks_use_is_used_and_what_is_new_is_written_once(pytester: pytest.Pytester, mode: str) -> None:
    arguments = (f"--ranks-launch={mode}", "--snapshot-update")
    created = run(pytester, RANKED_AND_PLAIN, *arguments)
    assert created.outcomes == {"passed": 2}
    assert "2 snapshots generated." in created.stdout
    assert stored(pytester).read_text() == STORED
    again = run(pytester, RANKED_AND_PLAIN, *arguments)
    assert "2 snapshots passed." in again.stdout
    assert "unused" not in again.stdout
    assert stored(pytester).read_text() == STORED
    changed = run(pytester, RANKED_AND_PLAIN.replace('"size"', '"ranks"'), *arguments)
    assert "1 snapshot passed. 1 snapshot updated." in changed.stdout
    assert stored(pytester).read_text() == STORED.replace("size", "ranks")
    stored(pytester).write_text(STORED)
    compared = run(pytester, RANKED_AND_PLAIN, f"--ranks-launch={mode}")
    assert (compared.returncode, compared.outcomes) == (0, {"passed": 2})
    assert "2 snapshots passed." in compared.stdout


def test_a_snapshot_that_no_rank_uses_any_more_is_deleted_on_request(pytester: pytest.Pytester) -> None:
    store(pytester, STORED + "# name: test_ranked.1\n  1\n# ---\n")
    result = run(pytester, RANKED_AND_PLAIN)
    assert result.returncode == 1
    assert "2 snapshots passed. 1 snapshot unused." in result.stdout
    result = run(pytester, RANKED_AND_PLAIN, "--snapshot-update")
    assert "Deleted test_ranked.1 " in result.stdout
    assert stored(pytester).read_text() == STORED


def test_a_snapshot_that_differs_fails_on_the_ranks_that_have_it(pytester: pytest.Pytester) -> None:
    store(pytester, STORED)
    source = RANKED_AND_PLAIN.replace("group.world_size", "2 + group.rank")
    result = run(pytester, source)
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert result.verdicts["test_ranked"].ranks == (1,)
    assert "'size': 3" in result.stdout
    assert "1 snapshot failed. 1 snapshot passed." in result.stdout


OWN_VALUES = """
@world_size(2)
def test_ranked(group, snapshot):
    dist.barrier()
    assert {"size": group.rank} == snapshot
"""


@pytest.mark.parametrize("text", ["", STORED], ids=["new", "changed"])
def test_ranks_with_values_of_their_own_fail_and_nothing_is_written(pytester: pytest.Pytester, text: str) -> None:
    store(pytester, text)
    result = run(pytester, OWN_VALUES, "--snapshot-update")
    assert result.outcomes == {"failed": 1}
    verdict = result.verdicts["test_ranked"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("FAIL", "assertion", (0, 1))
    assert verdict.where.startswith("test_example.py:")
    assert verdict.reason == "ranks 0 and 1 have different values for the snapshot 'test_ranked': none is written"
    assert "snapshot(name=f'rank{group.rank}')" in result.stdout
    again = diagnose(load(result.folder("test_ranked")))
    assert (again.outcome, again.reason, again.advice) == (verdict.outcome, verdict.reason, verdict.advice)
    assert "test_ranked" in stored(pytester).read_text() if text else not stored(pytester).read_text()


def test_a_value_that_one_rank_changes_and_another_has_is_not_written(pytester: pytest.Pytester) -> None:
    store(pytester, STORED)
    source = RANKED_AND_PLAIN.replace("group.world_size", "2 + group.rank")
    result = run(pytester, source, "--snapshot-update")
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert stored(pytester).read_text() == STORED


def test_each_rank_may_have_snapshots_of_its_own(pytester: pytest.Pytester) -> None:
    source = """
@world_size(2)
def test_ranked(group, snapshot):
    assert group.rank == snapshot(name=f"rank{group.rank}")
    if group.rank == 1:
        assert "only here" == snapshot(name="second")
        assert "only here" == snapshot(name="second")
"""
    assert "3 snapshots generated." in run(pytester, source, "--snapshot-update").stdout
    text = stored(pytester).read_text()
    assert [f"# name: test_ranked[{name}]" in text for name in ("rank0", "rank1", "second")] == [True] * 3
    result = run(pytester, source)
    assert (result.returncode, result.outcomes) == (0, {"passed": 1})
    assert "3 snapshots passed." in result.stdout


EXTENSIONS = """
from syrupy.extensions.json import JSONSnapshotExtension
from syrupy.extensions.single_file import SingleFileSnapshotExtension

class Mine(SingleFileSnapshotExtension): _file_extension = file_extension = "mine"

@pytest.fixture
def snapshot_json(snapshot): return snapshot.with_defaults(extension_class=JSONSnapshotExtension)

@world_size(2)
def test_ranked(group, snapshot, snapshot_json):
    assert {"size": 2} == snapshot_json
    assert bytes(range(256)) == snapshot(extension_class=Mine)
    assert "text" == snapshot
"""


def test_extensions_write_as_they_do_without_ranks(pytester: pytest.Pytester) -> None:
    assert run(pytester, EXTENSIONS, "--snapshot-update").outcomes == {"passed": 1}
    folder = pytester.path / "__snapshots__"
    written = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    without = EXTENSIONS.replace("@world_size(2)", "").replace("group, ", "")
    assert run(pytester, without).returncode == 0  # it finds each, with the value that it has
    assert len(written) == 3
    assert bytes(range(256)) in written.values()
    result = run(pytester, EXTENSIONS)
    assert (result.returncode, result.outcomes) == (0, {"passed": 1})
    assert {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == written


def test_an_extension_that_the_host_cannot_find_is_refused(pytester: pytest.Pytester) -> None:
    source = """
@world_size(2)
def test_ranked(group, snapshot):
    class Mine(type(snapshot.extension)): pass
    assert 1 == snapshot.use_extension(Mine)
"""
    result = run(pytester, source, "--snapshot-update")
    assert result.outcomes == {"failed": 1}
    assert "the extension Mine is made inside a function" in result.stdout


REFUSED = """
@pytest.mark.backend("none")
@world_size(2)
def test_ranked(group, snapshot): assert {"size": 2} == snapshot

def test_plain(snapshot): assert {"a": 1} == snapshot
"""
HANGS = """
@world_size(2)
@pytest.mark.timeout(30)
def test_ranked(group, snapshot):
    if group.rank == 0:
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert {"size": 2} == snapshot

def test_plain(snapshot): assert {"a": 1} == snapshot
"""
HANGS_LATER = HANGS.replace("    if group", '    assert {"size": 2} == snapshot(name="before")\n    if group')
DIES = HANGS.replace("dist.all_reduce(torch.ones(1))", "os.kill(os.getpid(), signal.SIGKILL)")


BUSY = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""


@pytest.mark.parametrize("source", [REFUSED, HANGS, HANGS_LATER, DIES], ids=["refused", "hangs", "later", "dies"])
def test_a_test_that_did_not_get_to_its_snapshots_keeps_them(pytester: pytest.Pytester, source: str) -> None:
    store(pytester, STORED)
    result = run(pytester, source, "--snapshot-update")
    assert result.outcomes == {"passed": 1, "errors" if source is REFUSED else "failed": 1}
    assert stored(pytester).read_text() == STORED
    assert "Deleted" not in result.stdout


@pytest.mark.parametrize("arguments", [("-x",), ("--ranks-launch=fork", "-p", "busy")], ids=["stopped", "usage"])
def test_a_session_that_ends_early_keeps_those_of_its_ranked_tests(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    store(pytester, STORED.replace("test_plain", "test_later"))
    (pytester.path / "busy.py").write_text(BUSY)
    source = """
def test_fails(): assert False

@world_size(2)
def test_ranked(group, snapshot): assert {"size": 2} == snapshot

@world_size(2)
def test_later(group, snapshot): assert {"a": 1} == snapshot
"""
    result = run(pytester, source, "--snapshot-update", *arguments)
    assert result.returncode != 0
    assert "passed" not in result.outcomes
    assert stored(pytester).read_text() == STORED.replace("test_plain", "test_later")


@pytest.mark.slow
def test_under_xdist_each_worker_s_ranks_hand_theirs_over(pytester: pytest.Pytester) -> None:
    source = RANKED_AND_PLAIN + "".join(
        f"@world_size(2)\ndef test_more{n}(group, snapshot): assert {n} == snapshot\n" for n in range(4)
    )
    result = run(pytester, source, "-p", "xdist", "-n2", "--snapshot-update")
    assert result.outcomes == {"passed": 6}
    text = stored(pytester).read_text()
    assert all(f"# name: test_more{n}\n" in text for n in range(4))
    result = run(pytester, source, "-p", "xdist", "-n2")
    assert (result.returncode, result.outcomes) == (0, {"passed": 6})


@pytest.mark.slow
def test_under_an_outer_launcher_the_first_process_writes(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + RANKED_AND_PLAIN)
    port = free_port()
    processes = [slurm(warm, pytester, rank, port, "-p", "syrupy", "--snapshot-update") for rank in (0, 1)]
    assert [(p.communicate(timeout=120)[0], p.returncode)[1] for p in processes] == [0, 0]
    assert stored(pytester).read_text() == STORED


def test_more_than_is_read_of_a_rank_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import pytest_nsa.rank.snapshots\npytest_nsa.rank.snapshots.LARGEST = 2000")
    source = """
@world_size(2)
@pytest.mark.parametrize("n", [100, 300])
def test_ranked(group, snapshot, n):
    for _ in range(3):
        assert "x" * n == snapshot
"""
    result = run(pytester, source, "--snapshot-update")
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert "snapshot 'test_ranked[300].2': a test's snapshots have at most" in result.stdout
    assert stored(pytester).read_text().count("# name: ") == 3


def test_a_masked_run_writes_the_values_that_the_test_gave(pytester: pytest.Pytester) -> None:
    source = """
@world_size(2)
def test_ranked(group, snapshot): assert "hf_" + "abcDEF0123456789" * 2 == snapshot
"""
    secret = "hf_" + "abcDEF0123456789" * 2
    result = run(pytester, source, "--snapshot-update", "-o", "ranks_mask_output=true", "--ranks-keep=all")
    assert result.outcomes == {"passed": 1}
    assert secret in stored(pytester).read_text()
    handed_over = list(result.folder("test_ranked").glob("rank*/snapshots.jsonl"))
    assert len(handed_over) == 2
    assert not any(secret in path.read_text() for path in handed_over)


def test_a_version_that_cannot_hand_them_over_is_refused_and_deletes_nothing(pytester: pytest.Pytester) -> None:
    store(pytester, STORED)
    pytester.makeconftest("import syrupy.session\ndel syrupy.session.SnapshotSession.queue_snapshot_write")
    result = run(pytester, RANKED_AND_PLAIN)
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "test_ranked: takes 'snapshot', and this version of syrupy has no queue_snapshot_write" in result.stdout
    result = run(pytester, RANKED_AND_PLAIN, "--snapshot-update")
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "this run updates none" in result.stdout
    assert stored(pytester).read_text() == STORED


INLINE = """
from inline_snapshot import snapshot

@world_size(2)
def test_ranked(group): assert 5 == snapshot()

@world_size(2)
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
