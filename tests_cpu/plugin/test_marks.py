"""The marks as a user meets them: described, usable as decorators, refused at collection when wrong."""

import os

import pytest

from pytest_nsa.marks import MAX_WORLD_SIZE, RULES
from pytest_nsa.testing import HEADER, run_example


def test_each_mark_is_described(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest_subprocess("--markers").stdout.str()
    for form in (
        "world_size(*n, group='made')", "backend(name)",
        "branch(*names)", "gc_range(*ranges)", "trace(*kinds)", "trace_kinds(*kinds)",
        "hash_seeds(*seeds)", "scenario(name, reads_as='')",
        "static_graph", "gpu(count=None, share=False, memory=None)", "reuse(group='kept')", "cores(n)", "rank_env(**variables)",
        "fails_as(cause)", "rerun(wanted)",
    ):  # fmt: skip
        assert f"@pytest.mark.{form}: " in text
    assert len(RULES) == 16


@pytest.mark.parametrize(
    ("mark", "fixture", "says"),
    [
        ("world_size(0)", "group", f"must be from 1 to {MAX_WORLD_SIZE} ranks"),
        ("world_size('2')", "group", "takes one whole number of ranks"),
        ("world_size(2, group='none')", "group", "takes numbers of ranks and group=None"),
        ("world_size('two')", "group", "takes one whole number of ranks, as in world_size(2), or several"),
        ("backend('mpi')", "group", "'mpi' must be one of gloo, nccl"),
        ("branch('foo')", "branch", "'foo' must be one of cmp, sel, win"),
        ("branch()", "branch", "takes one or more of cmp, sel, win"),
        ("branch('sel')", "group", "does nothing, as the test does not take the fixture 'branch'"),
        ("gc_range('6:3')", "gc_range", "the range must go up"),
        ("gc_range('a:b')", "gc_range", "must be 'start:end' in whole layers"),
        ("gc_range(3)", "gc_range", "must be 'start:end' in whole layers"),
        ("trace('grad')", "trace", "'grad' must be one of grads, module_bwd, ddp_buckets"),
        ("scenario('../up')", "group", "takes one name of letters"),
        ("static_graph(True)", "ddp", "takes no argument"),
        ("static_graph", "group", "does nothing, as the test does not take the fixture 'ddp'"),
        ("gpu(1)", "group", "takes count="),
        ("gpu(count=0)", "group", "count=0 must be a whole number of GPUs"),
        ("gpu(memory='8 gigs')", "group", "memory='8 gigs' must be a whole number of MiB or GiB"),
        ("rank_env()", "group", "takes variables by name"),
        ("rank_env(A=1)", "group", "A=1: must be text"),
        ("rank_env(RANK='1')", "group", "RANK: the plugin numbers the ranks"),
        ("reuse(group='new')", "group", "takes group='kept' or group='fresh'"),
        ("reuse", "group", "belongs on a class or a module"),
        ("fails_as('cosmic_ray')", "group", "'cosmic_ray' must be one of skipped_collective, "),
        ("hash_seeds('3')", "group", "takes a whole number from 0 to 4294967295 for each rank"),
        ("hash_seeds(3)", "group", "is for 1 of 2 ranks"),
        ("cores(100000)", "group", f"this machine lends {len(os.sched_getaffinity(0))} cores"),
    ],
)
def test_a_wrong_mark_is_refused_with_file_and_line(
    pytester: pytest.Pytester, mark: str, fixture: str, says: str
) -> None:
    pytester.makepyfile(test_wrong=f"import pytest\n\n@pytest.mark.{mark}\ndef test_it({fixture}): pass\n")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    shown = mark.partition("(")[0] if mark == "hash_seeds(3)" else mark
    assert f"test_wrong.py:3: test_it: {shown}: {says}" in result.stdout.str()
    assert not (pytester.path / "artifacts").exists()


@pytest.mark.parametrize("form", ["1, 3", "[1, 3]"], ids=["several", "a list, as other suites have it"])
def test_several_numbers_of_ranks_make_a_test_each(pytester: pytest.Pytester, form: str) -> None:
    source = f"""
    @pytest.mark.world_size({form})
    @pytest.mark.parametrize("x", [5])
    def test_it(group, x):
        assert x == 5
        print("ranks:", group.world_size, dist.get_world_size())
    """
    result = run_example(pytester, source, "-v", "-s")
    assert result.outcomes == {"passed": 2}
    assert "test_it[5-1-ranks]" in result.stdout or "test_it[1-ranks-5]" in result.stdout
    assert "ranks: 3 3" in result.stdout
    assert "ranks: 1 1" in result.stdout


def test_marks_set_values_and_parametrize(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        HEADER
        + """
@branch("sel")
@gc_range("0:6")
def test_one(branch, gc_range):
    assert branch == "sel"
    assert (gc_range, gc_range.start, gc_range.end) == ("0:6", 0, 6)

@pytest.mark.branch("cmp", "sel", "win")
@pytest.mark.gc_range("0:6", "6:12")
def test_many(branch, gc_range):
    assert branch in ("cmp", "sel", "win") and gc_range.end in (6, 12)

def test_none(branch, gc_range):
    assert branch is None and gc_range is None
"""
    )
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["*test_many*sel*0:6* PASSED*"])


def test_gpu_tests_are_listed_everywhere_and_skipped_with_one_reason(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = "@gpu\n@world_size(2)\ndef test_a(group): pass\n@gpu\ndef test_b(): pass\n"
    listed = run_example(pytester, source, "--collect-only", "-q", "-m", "gpu")
    assert "test_a" in listed.stdout
    result = run_example(pytester, source, "-m", "gpu", "-rs")
    assert result.outcomes == {"skipped": 2}
    assert "SKIPPED [2]" in result.stdout
    assert "needs a GPU" in result.stdout


def test_a_test_that_must_fail_by_a_cause(pytester: pytest.Pytester) -> None:
    source = """
from pytest_nsa import fails_as

def leaves(group):
    if group.rank == 1:
        raise RuntimeError("gone")
    dist.barrier()

@fails_as("rank_exception")
@world_size(2)
def test_as_foreseen(group): leaves(group)

@fails_as("rank_exited")
@world_size(2)
def test_by_another_cause(group): leaves(group)

@fails_as("rank_exception")
@world_size(2)
def test_that_passes(group): pass

@fails_as("rank_exception")
@world_size(2)
def test_that_skips(group): pytest.importorskip("no_such_module")
"""
    result = run_example(pytester, source, "-rA")
    text = result.stdout
    assert result.outcomes == {"xfailed": 1, "failed": 2, "skipped": 1}
    assert "rank_exception, as expected: RuntimeError: gone" in text
    assert "expected to fail as rank_exception, but passed" in text
    assert result.verdicts["test_as_foreseen"].expected
    assert result.verdicts["test_by_another_cause"].failed
    assert result.verdicts["test_by_another_cause"].reason.endswith("(fails_as expected rank_exited)")
    assert "(fails_as expected rank_exited)" in text
    assert result.verdicts["test_that_passes"].failed


def test_marks_of_ranks_are_refused_where_there_are_none(pytester: pytest.Pytester) -> None:
    source = "@fails_as('oom')\ndef test_a(): pass\n@hash_seeds\ndef test_b(): pass\n"
    result = run_example(pytester, source)
    assert result.outcomes == {"errors": 2}
    for name in ("fails_as", "hash_seeds"):
        assert f"{name}: does nothing, as the test does not run on ranks" in result.stdout


OWN_NAMES = """
import os
import pytest

@pytest.mark.parametrize("ddp", [False, True])
def test_a_parameter(ddp):
    assert "RANK" not in os.environ

class TestExtended:
    @pytest.fixture
    def group(self, group):
        return group.world_size

    def test_what_it_extends(self, group):
        assert group == 2 and "RANK" in os.environ
"""


def test_a_parameter_with_the_name_of_a_fixture_requests_no_ranks_and_a_fixture_that_extends_one_does(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(OWN_NAMES)
    done = pytester.runpytest_subprocess()
    done.assert_outcomes(passed=3)
    assert "nsa: 1 of 3 tests on ranks" in done.stdout.str()


@pytest.mark.timeout(120)
def test_a_limit_for_the_call_alone_does_not_count_fixtures(pytester: pytest.Pytester) -> None:
    result = run_example(
        pytester,
        """
        @pytest.fixture
        def slow():
            time.sleep(4)  # longer than the limit
            yield
            time.sleep(4)

        @pytest.mark.timeout(3, func_only=True)
        @world_size(2)
        def test_passes(group, slow): pass

        @pytest.mark.timeout(3, func_only=True)
        @world_size(2)
        def test_waits(group, slow):
            threading.Event().wait()
        """,
        "--ranks-rerun=off",
    )
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert result.verdicts["test_waits"].outcome == "HANG"
    assert result.verdicts["test_waits"].duration_s < 60  # it is ended by the limit of the call
