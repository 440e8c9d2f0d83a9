"""Worker groups before and after their test: forked ahead, shared by a class, joined in one store; what ranks leave running."""

from pathlib import Path

import pytest

from pytest_nsa.testing import ExampleResult, run_example

PIDS = """
def leave(artifacts, group):
    (artifacts / f"pid{group.rank}").write_text(str(os.getpid()))
"""


def pids(result: ExampleResult, *names: str) -> list[tuple[str, ...]]:
    """Return the process ids of each test's ranks."""
    folders = [result.folder(name) for name in names]
    return [tuple(path.read_text() for path in sorted(folder.glob("pid*"))) for folder in folders]


@pytest.mark.parametrize("arguments", [(), ("-o", "ranks_ahead=false"), ("-p", "no:timeout")])
def test_worlds_of_several_sizes_follow_each_other_in_fresh_processes(
    pytester: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    source = """
seen = []

@pytest.mark.parametrize("n", [pytest.param(n, marks=world_size(n)) for n in (2, 2, 2, 3, 1, 2, 4)])
def test_it(group, n):
    seen.append(n)
    assert seen == [n]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == n == group.world_size

def test_dies(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_plain(): pass

def test_after(group): dist.barrier()
"""
    result = run_example(pytester, source, *arguments)
    assert result.outcomes == {"passed": 9, "failed": 1}
    assert result.verdicts["test_dies"].cause == "rank_died"
    assert not (result.run / ".worker_groups").exists()  # type: ignore[operator]


def test_a_class_shares_its_ranks_until_one_fails(pytester: pytest.Pytester) -> None:
    source = (
        PIDS
        + """
@reuse
class TestShared:
    seen = []

    @pytest.mark.parametrize("n", range(7))
    def test_it(self, group, n, artifacts):
        leave(artifacts, group)
        self.seen.append(n)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        print(f"this is {n}")
        if n == 2:
            assert group.rank == 0
        if n == 4 and group.rank == 1:
            dist.all_reduce(total, async_op=True)  # passes, and leaves the group uneven

def test_of_its_own(group, artifacts): leave(artifacts, group)
"""
    )
    result = run_example(pytester, source, "--ranks-keep=all")
    assert result.outcomes == {"passed": 7, "failed": 1}
    names = [f"test_it[{n}]" for n in range(7)]
    ranks = pids(result, *names, "test_of_its_own")
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[3] == ranks[4]
    assert ranks[5] == ranks[6]
    assert len(set(ranks)) == 4
    # Each test has its own evidence, as if it had fresh ranks.
    for n, name in enumerate(names):
        folder = result.folder(name)
        assert (folder / "rank1" / "output.log").read_text() == f"this is {n}\n"
        assert (folder / "rank1" / "board.bin").is_file()
    failed = result.verdicts["TestShared::test_it[2]"]
    assert (failed.cause, failed.ranks) == ("assertion", (1,))


def test_shared_ranks_may_have_a_fresh_group_for_each_test(pytester: pytest.Pytester) -> None:
    """The form that torch's suites move to (pytorch#198156): what a test does to its group is gone with it."""
    source = (
        PIDS
        + """
@reuse(group="fresh")
class TestShared:
    kept = []

    @pytest.mark.parametrize("n", range(55))
    def test_it(self, group, n, artifacts):
        leave(artifacts, group)
        assert dist.distributed_c10d._get_default_group() not in self.kept
        self.kept.append(dist.distributed_c10d._get_default_group())
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        if n == 1:
            dist.destroy_process_group()  # and leaves the next none
        if n == 2:
            dist.new_group([0, 1])
"""
    )
    result = run_example(pytester, source, "--ranks-keep=all")
    assert result.outcomes == {"passed": 55}
    found = pids(result, *(f"TestShared::test_it[{n}]" for n in range(55)))
    assert [found.count(ranks) for ranks in dict.fromkeys(found)] == [50, 5], "ranks go once they have had 50 groups"


def test_the_store_keeps_torch_s_promises(pytester: pytest.Pytester) -> None:
    source = """
from datetime import timedelta
from torch.distributed.device_mesh import init_device_mesh

def test_it(group):
    store = dist.distributed_c10d._get_default_store()
    assert not store.check(["nobody"])
    store.set(f"text{group.rank}", "a\\u00e9")
    assert store.get(f"text{1 - group.rank}") == "a\\u00e9".encode()
    store.set("bytes", bytes(range(256)))
    assert store.get("bytes") == bytes(range(256))
    dist.barrier()
    assert store.add("count", 1) in (1, 2)
    dist.barrier()
    assert store.add("count", 0) == 2
    assert store.compare_set(f"once{group.rank}", "", "first") == b"first"
    assert store.compare_set(f"once{group.rank}", "other", "second") == b"first"
    assert store.delete_key(f"once{group.rank}")
    assert not store.delete_key(f"once{group.rank}")
    assert store.num_keys() > 3
    prefixed = dist.PrefixStore("p", store)
    with pytest.raises(dist.DistStoreError):
        prefixed.wait(["never"], timedelta(seconds=0.2))
    prefixed.set(f"k{group.rank}", "v")
    prefixed.wait(["k0", "k1"])
    assert prefixed.multi_get(["k0", "k1"]) == [b"v", b"v"]
    subgroup = dist.new_group([0, 1])
    dist.barrier(subgroup)
    mesh = init_device_mesh("cpu", (2,))
    dist.barrier(mesh.get_group())
    dist.monitored_barrier()
"""
    assert run_example(pytester, source).outcomes == {"passed": 1}


def test_what_a_rank_leaves_running_is_ended_and_reported(pytester: pytest.Pytester) -> None:
    source = """
import subprocess
from torch.utils.data import DataLoader

def start(seconds, **options):
    return subprocess.Popen(["sleep", str(seconds)], **options).pid

def test_leaves_a_child_and_a_daemon(group, artifacts):
    if group.rank == 1:
        (artifacts / "child").write_text(str(start(1001)))
        (artifacts / "session").write_text(str(start(1002, start_new_session=True)))
        subprocess.run(["sh", "-c", "setsid sleep 1003 & echo $! > " + str(artifacts / "daemon")], check=True)
        pid = (artifacts / "daemon").read_text().strip()
        while not open(f"/proc/{pid}/cmdline").read().startswith("sleep"):
            time.sleep(0.01)

def test_dies_and_leaves_a_child(group, artifacts):
    if group.rank == 1:
        (artifacts / "orphan").write_text(str(start(1004, start_new_session=True)))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@world_size(1)
def test_data_loader_workers_are_not_reported(group):
    loader = DataLoader(range(8), num_workers=1, persistent_workers=True)
    keep.append(iter(loader))
    next(keep[0])
keep = []
"""
    # Of a loader's fork, from 3.12 on.
    result = run_example(pytester, source, "-W", "ignore:This process:DeprecationWarning")
    assert result.outcomes == {"passed": 2, "failed": 1, "warnings": 3}, result.stdout
    left = [path for path in result.run.glob("*/*") if path.name in ("child", "session", "daemon", "orphan")]
    assert len(left) == 4
    assert not [path.name for path in left if Path("/proc", path.read_text().strip()).exists()]
    for seconds in (1001, 1002, 1003):
        assert f"rank 1 left a process running, which was ended: sleep {seconds}" in result.stdout


def test_a_host_fixture_may_run_other_ranks_first(pytester: pytest.Pytester) -> None:
    """DeepSpeed's DistributedFixture: save on two ranks, load on one."""
    source = """
def save(path, group):
    torch.save({"of": group.world_size}, f"{path}/shard{group.rank}.pt")
    assert "bad" not in path or group.rank == 0

@host_fixture(scope="function")
def checkpoint(launch, tmp_path, request):
    folder = tmp_path / request.node.name
    folder.mkdir()
    outcome = launch(save, world_size=2, arguments={"path": str(folder)})
    assert outcome.passed, outcome.verdict.reason
    return folder

@world_size(1)
def test_loads(group, checkpoint):
    assert [torch.load(checkpoint / f"shard{rank}.pt")["of"] for rank in range(2)] == [2, 2]
    assert group.world_size == 1

@world_size(1)
def test_bad(group, checkpoint): pass

@world_size(1)
def test_takes_it_itself(group, launch): pass
"""
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 1, "errors": 2}
    assert "remove one of the two, or launch in a host_fixture" in result.stdout.replace("\n", " ")
