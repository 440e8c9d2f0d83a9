"""The statement at which ranks part, by their recorded control flow: with `sys.settrace`, and from Python 3.12 on `sys.monitoring`.

Neither torch nor a process of a rank is needed: each rank of a program runs here, one after another.
"""

import contextlib
import dataclasses
import gc
import importlib
import inspect
import json
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.trace.flow import log as written
from nsa.trace.flow.recorder import FlowRecorder
from nsa.trace.flow.statements import parse_lines
from nsa.trace.flow.values import ABSENT, find
from nsa.trace.frames import add_user_file
from pytest_nsa.diagnosis.divergence import with_divergence
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.flow import read as reading
from pytest_nsa.flow.align import COLLECTIVES, KEYS, MESSAGES
from pytest_nsa.flow.first import (
    FirstDivergence,
    find_first,
    find_last_decision,
    find_owed,
    find_unended,
    passes_a_call,
)
from pytest_nsa.flow.read import Flow, read_flow
from tests_cpu.flow import programs, roles

RANKS = 3
PROGRAMS = {
    name: f for name, f in vars(programs).items() if inspect.isfunction(f) and f.__module__ == programs.__name__
}
FITTING = [name for name in PROGRAMS if name.startswith("fits")]
PARTING = [name for name in PROGRAMS if name not in FITTING]
# How the ranks of a program part, and a name in the chain of reasons.
KINDS = {
    "leaves_a_loop_by_its_own_value": ("branch", "local"),
    "skips_a_batch": ("branch", "size"),
    "counts_other_things": ("branch", "self.count"),
    "stops_a_trainer_by_a_callback": ("branch", "loss"),
    "makes_more_passes": ("loop", "size"),
    "waits_until_it_is_done": ("loop", "done"),
    "swallows_an_exception": ("exception", None),
    "gives_another_size": ("argument", "width"),
    "filters_in_a_comprehension": ("callee", "limit"),
    "decides_in_one_line": ("branch", "size"),
    "decides_in_the_line_of_a_call_that_fails": ("callee", "rank"),
}
# What a rank did next.
NEXT = {
    "saves_on_one_rank": (0, "begins all_gather"),
    "begins_a_call_that_fails": (0, "begins barrier"),
    "raises_where_others_call": (2, "raises ValueError: no room"),
}


def record(program: Callable[..., None], folder: Path, rank: int, size: int = written.SIZE) -> Flow:
    """Run a program as a rank, with its control flow recorded; return what was recorded."""
    add_user_file(inspect.getfile(program))
    path = folder / f"{program.__name__}{rank}.bin"
    recorder = FlowRecorder(path, size)

    recorder.start()
    try:
        program(rank, _call_of(recorder))
    finally:
        recorder.stop()
    flow = read_flow(path, rank)
    assert flow is not None
    return flow


def _call_of(recorder: FlowRecorder) -> programs.Call:
    """Return a function that is no code of the program, as those of torch are none."""
    names: dict[str, programs.Call] = {}
    source = (
        "def call(op, what='', **facts): stop() if op == 'stuck' else "
        "begin({'kind': 'collective', 'op': op, 'group': '0', 'what': what} | facts)"
    )
    exec(compile(source, "<call>", "exec"), {"begin": recorder.call, "stop": recorder.stop}, names)
    return names["call"]


def first_of(program: Callable[..., None], folder: Path, ranks: int = RANKS, **how: Any) -> FirstDivergence | None:
    """Return the first divergence of a program's ranks, all of them in each group."""
    return find_first([record(program, folder, rank) for rank in range(ranks)], lambda group: range(ranks), **how)


def guess(cause: str, ranks: tuple[int, ...], world_size: int = RANKS, **fields: Any) -> Verdict:
    """Return a verdict of the first run."""
    return Verdict(nodeid="test", cause=cause, ranks=ranks, world_size=world_size, **{"outcome": "HANG", **fields})


@pytest.mark.parametrize("name", PARTING)
def test_the_statement_at_which_ranks_part(name: str, tmp_path: Path) -> None:
    found = first_of(PROGRAMS[name], tmp_path)
    assert found is not None
    assert found.where.split()[0] == get_marked(PROGRAMS[name]), found
    assert sorted(rank for ranks in found.outcomes.values() for rank in ranks) == list(range(RANKS))
    assert len(found.exceptional) == 1
    assert {*find_lines(PROGRAMS[name], "# DECIDED")} <= {step.where.split()[0] for step in found.because if step.where}
    kind, chain = KINDS.get(name, (found.kind, None))
    assert found.kind == kind
    assert chain is None or chain in {step.name for step in found.because}
    if name in NEXT:
        assert NEXT[name] in [(rank, did) for rank, (_, did) in found.then.items()]
        assert [did for _, did in found.then.values()].count(NEXT[name][1]) == 1
    assert FirstDivergence.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("saves_on_one_rank", (0,)),
        ("swallows_an_exception", (0,)),
        ("leaves_a_loop_by_its_own_value", ()),
        ("saves_where_the_ranking_says", ()),
        ("calls_in_a_later_round", (0,)),
    ],
)
def test_which_of_two_ranks_did_otherwise(name: str, blamed: tuple[int, ...], tmp_path: Path) -> None:
    found = first_of(PROGRAMS[name], tmp_path, 2)
    assert (found.exceptional, found.raising or found.in_role) == ((), blamed)


@pytest.mark.parametrize("name", FITTING)
def test_ranks_that_differ_in_nothing_that_others_see_do_not_part(name: str, tmp_path: Path) -> None:
    kinds = COLLECTIVES | MESSAGES if name.startswith("fits_though_messages") else COLLECTIVES
    assert first_of(PROGRAMS[name], tmp_path, kinds=kinds) is None


@pytest.mark.parametrize(
    ("name", "ranks", "cause"),
    [("raises_after_it_left_out_a_call", (), "skipped_collective"), ("calls_in_its_handler", (0,), "rank_exception")],
)
def test_whether_an_exception_follows_from_the_difference(
    name: str, ranks: tuple[int, ...], cause: str, tmp_path: Path
) -> None:
    found = first_of(PROGRAMS[name], tmp_path)
    assert found.raised_before == ranks
    raised = guess("rank_exception", (0,), outcome="FAIL", reason="ValueError: no")
    changed = with_divergence(raised, found, is_same=True)
    assert (changed.cause, changed.ranks) == (cause, (0,))
    assert ("then ValueError: no" in changed.because) == (cause != "rank_exception")


def test_a_decision_of_a_library_is_the_reason(tmp_path: Path) -> None:
    found = first_of(programs.skips_a_batch, tmp_path)
    within = "/env/lib/python3.12/site-packages/trainers/loop.py:7 in run: if self.stop:"
    changed = with_divergence(guess("unknown", (0, 1, 2)), dataclasses.replace(found, within=within), is_same=True)
    assert (changed.ranks, changed.where) == ((2,), found.where)
    assert changed.reason == "the ranks parted at `if self.stop:` of trainers, called here"


@pytest.mark.parametrize(
    ("name", "decides"), [("leaves_a_loop_by_its_own_value", "`local`"), ("counts_other_things", "`is_due()`")]
)
def test_what_to_reduce_before_a_decision(name: str, decides: str, tmp_path: Path) -> None:
    found = first_of(PROGRAMS[name], tmp_path)
    assert decides in with_divergence(guess("unknown", (0, 1, 2)), found, is_same=True).advice


def test_a_message_that_its_receiver_expects_under_another_tag(tmp_path: Path) -> None:
    found = first_of(programs.fits_until_a_tag_differs, tmp_path, 2, kinds=COLLECTIVES | MESSAGES)
    assert (found.kind, set(found.values["tag"].values())) == ("argument", {"2", "3"})
    assert set(found.outcomes) == {"begins send (tag 2)", "begins recv (tag 3)"}
    # A guess at ranks that did not part gives way.
    for ranks, sure, blamed in (((2,), 0.4, (0, 1)), ((2,), 0.9, (2,)), ((0,), 0.4, (0,))):
        assert with_divergence(guess("unknown", ranks, confidence=sure), found, is_same=True).ranks == blamed


def find_missing_call(program: Callable[..., None], rank: int, folder: Path) -> FirstDivergence | None:
    """Return where a rank did not begin the call that the ranks wait for in their last one."""
    flows = [record(program, folder, r) for r in range(4)]
    awaited = [(flow.rank, calls[-1]) for flow in flows for calls in flow.calls.values() if flow.rank != rank and calls]
    waiting = [(r, call) for r, call in awaited if call.kind in ("receive", "wait")]
    return find_owed(flows, lambda group: range(4), waiting, [rank])


@pytest.mark.parametrize(
    ("program", "rank", "outcome", "before", "reason"),
    [
        (roles.publishes_not_every_version, 0, "true", "false", "norm"),
        (roles.numbers_what_it_publishes, 0, "true", "false", "loss"),
        (roles.sends_no_part_of_a_layer, 1, "left the loop", "another pass", "owned()"),
        (roles.sends_fewer_than_others, 3, "left the loop", "", "prompts"),
    ],
)
def test_a_call_that_a_rank_owes(
    program: Callable[..., None], rank: int, outcome: str, before: str, reason: str, tmp_path: Path
) -> None:
    found = find_missing_call(program, rank, tmp_path)
    assert (found.outcomes[outcome], found.outcome_before) == ((rank,), before)
    assert reason in {step.name for step in found.because}
    places = [found.where, *(step.where for step in found.because if step.where)]
    assert get_marked(program) in {place.split()[0] for place in places}
    missing = guess("p2p_unmatched", (rank,), 4, reason="they do not pair")
    verdict = with_divergence(missing, found, is_same=True)
    assert (verdict.cause, verdict.ranks, verdict.where) == ("p2p_unmatched", (rank,), found.where)
    than = "in its round before" if before else "the others"
    assert verdict.reason == f"rank {rank} did otherwise than {than} at `{found.statement}`"
    assert verdict.because[0] == "they do not pair"


def test_the_decision_that_led_to_a_wait_for_no_other_rank(tmp_path: Path) -> None:
    program = roles.stops_before_a_thread_has_ended
    flows = [record(program, tmp_path, rank) for rank in range(3)]
    assert find_first(flows, lambda group: range(3)) is None
    found = find_last_decision(flows, lambda group: range(3), [1])
    assert (found.where.split()[0], found.outcomes["true"]) == (get_marked(program), (1,))


@pytest.mark.parametrize(
    ("program", "ranks"),
    [(roles.waits_in_its_part, 3), (roles.waits_before_it_uses_a_batch, 2)],
    ids=["a part", "before"],
)
def test_a_rank_that_has_not_come_as_far_may_meet_the_others(
    program: Callable[..., None], ranks: int, tmp_path: Path
) -> None:
    assert first_of(program, tmp_path, ranks) is None


@pytest.mark.parametrize(
    "program",
    [
        roles.keeps_a_permit,
        roles.raises_while_it_holds_a_lock,
        roles.waits_for_what_a_thread_has_not_set,
        roles.waits_for_a_worker_that_passes_over_a_part,
        roles.waits_for_a_worker_that_waits_for_a_version,
        roles.waits_in_a_coroutine,
    ],
)
def test_what_would_have_ended_a_wait(program: Callable[..., None], tmp_path: Path) -> None:
    flow = record(program, tmp_path, 1)
    found = find_unended([flow], lambda group: range(3), [1])
    assert found.where.split()[0] == get_marked(program)
    assert (found.outcomes, found.outcome_before) == ({"true": (1,)}, "false")
    assert find_unended([record(program, tmp_path, 0)], lambda group: range(3), [1]) is None


def test_ranks_of_one_class_show_more_than_those_of_two(tmp_path: Path) -> None:
    found = first_of(roles.has_less_room_than_other_workers, tmp_path)
    assert (found.outcomes, found.is_alone) == ({"false": (1,), "true": (2,)}, True)
    assert found.where.split()[0] == get_marked(roles.Worker)


def test_a_message_that_went_to_another_rank(tmp_path: Path) -> None:
    program = roles.sends_its_rows_to_another
    flows = [record(program, tmp_path, rank) for rank in range(3)]
    found = find_owed(flows, lambda group: range(3), [(0, flows[0].calls[0][-1])], (), by_peer=True)
    assert (found.where.split()[0], found.kind) == (get_marked(program), "argument")
    assert found.values_before["row"] == "2"
    verdict = with_divergence(guess("skipped_collective", (0,), confidence=0.3), found, is_same=True)
    assert (verdict.cause, verdict.ranks, verdict.where) == ("p2p_unmatched", (2,), found.where)
    sure = with_divergence(guess("skipped_collective", (0,), confidence=0.9), found, is_same=True)
    assert (sure.cause, sure.ranks) == ("skipped_collective", (0,))


def test_a_reduction_in_another_group(tmp_path: Path) -> None:
    flows = [record(PROGRAMS["reduces_in_another_group"], tmp_path, rank) for rank in range(3)]
    found = find_first(flows, lambda group: {"tp": (0, 1), "dp": (1, 2)}[group], [(0, 1)])
    assert found.outcomes == {"begins all_reduce (group tp)": (0,), "begins all_reduce (group dp)": (1,)}


def test_who_sets_keys_parts_by_right(tmp_path: Path) -> None:
    found = first_of(roles.reads_a_version_ahead, tmp_path, kinds=COLLECTIVES | KEYS)
    assert (found.where.split()[0], found.outcomes["true"]) == (get_marked(roles.reads_a_version_ahead), (2,))


@pytest.mark.parametrize("program", [roles.has_cached_its_plan, roles.has_read_its_plan_from_a_file])
def test_a_rank_that_passes_the_collective_of_others(program: Callable[..., None], tmp_path: Path) -> None:
    found = first_of(program, tmp_path, is_wanted=passes_a_call)
    assert (found.where.split()[0], found.exceptional) == (get_marked(program), (1,))
    unmatched = guess("p2p_unmatched", (0,), confidence=0.5)
    assert with_divergence(unmatched, found, is_same=True).ranks == (1,)
    for other in (roles.sends_fewer_than_others, roles.waits_for_a_neighbour_that_has_stopped):
        assert first_of(other, tmp_path, is_wanted=passes_a_call) is None


def test_a_rank_that_parts_from_others_in_several_ways_counts_once() -> None:
    outcomes = {"calls on_exchange": (0, 2), "calls on_arrive": (1,), "calls on_serve": (1,)}
    assert FirstDivergence(kind="callee", where="a.py:1 in run", statement="", outcomes=outcomes).exceptional == (1,)


def test_a_key_of_another_name(tmp_path: Path) -> None:
    program = roles.waits_for_a_key_of_another_name
    found = first_of(program, tmp_path, kinds=COLLECTIVES | KEYS)
    assert (found.where.split()[0], found.kind) == (get_marked(program), "argument")
    assert found.outcomes == {"waits for data/ab": (1,), "waits for data/ac": (2,)}


def find_lines(program: Callable[..., None], mark: str) -> list[str]:
    """Return the places, as FILE:LINE, of a program's statements with a mark."""
    lines, first = inspect.getsourcelines(program)
    return [f"{inspect.getfile(program)}:{first + n}" for n, line in enumerate(lines) if line.endswith(f"{mark}\n")]


def get_marked(program: Callable[..., None]) -> str:
    """Return the place of a program's one statement that ranks part at."""
    (place,) = find_lines(program, "# HERE")
    return place


def test_a_collection_while_a_source_is_parsed(tmp_path: Path) -> None:
    """A finalizer that the collection runs is recorded, which parses its source."""
    source = tmp_path / "module.py"
    source.write_text("def f(x):\n    return x + 1\n" * 300)
    errors: list[BaseException] = []

    class Cycle:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            try:
                parse_lines.__wrapped__(str(source))
            except SystemError as error:
                errors.append(error)

    threshold = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        for _ in range(20):
            Cycle()
            assert parse_lines.__wrapped__(str(source)).returns
    finally:
        gc.set_threshold(*threshold)
    assert not errors


def test_threads_write_whole_events(tmp_path: Path) -> None:
    log = written.FlowLog(tmp_path / "flow.bin", lambda: None)
    log.text(written.CODE, 1, "file\0name\0001\0002")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def write(number: int) -> None:
        log.enter(number, 0, 1, number)
        for _ in range(3000):
            log.text(written.CALL, number, json.dumps({"op": "x" * number}))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    flow = read_flow(tmp_path / "flow.bin", 0)
    assert {n: {call.op for call in calls} for n, calls in flow.calls.items()} == {n: {"x" * n} for n in range(1, 5)}
    assert [len(calls) for calls in flow.calls.values()] == [3000] * 4


def test_a_generator_that_one_rank_leaves_early_is_not_where_it_hangs(tmp_path: Path) -> None:
    def program(rank: int, call: Callable[..., None]) -> None:
        def numbers() -> Iterator[int]:
            yield 1
            yield 2

        call("all_reduce", what=str(next(numbers()) if rank == 0 else 0))

    assert first_of(program, tmp_path, 2).kind == "argument"


def test_ranks_of_another_group_decide_between_the_two_of_a_group(tmp_path: Path) -> None:
    def program(rank: int, call: Callable[..., None]) -> None:
        for step in range(3):
            if (rank, step) != (3, 1):
                call("all_reduce", group="a" if rank < 2 else "b")
        call("barrier")

    flows = [record(program, tmp_path, rank) for rank in range(4)]
    found = find_first(flows, lambda group: {"a": (0, 1), "b": (2, 3)}.get(group, range(4)))
    assert (found.exceptional, found.unlike_others, found.others) == ((), (3,), {"true": (0, 1)})
    assert FirstDivergence.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("how", "frames"),
    [("import", ["program", "work"]), ("fails", ["program"]), ("run", ["program", "<module>", "work", "work"])],
)
def test_what_an_installed_package_does_is_recorded_but_not_its_import(
    how: str, frames: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site-packages" / f"that_they_{how}.py"
    path.parent.mkdir()
    path.write_text(f"def work(n):\n    return n + 1\nwork(1)\n{'raise ImportError' if how == 'fails' else ''}\n")
    monkeypatch.syspath_prepend(str(path.parent))

    def program(rank: int, call: Callable[..., None]) -> None:
        if how == "run":
            runpy.run_path(str(path))["work"](rank)
        else:
            with contextlib.suppress(ImportError):
                importlib.import_module(path.stem).work(rank)
        call("all_reduce")

    flow = record(program, tmp_path, 0)
    names = [frame.name for frame in flow.frames.values()]
    names = names[names.index("program") :]  # behind the frames that were open
    assert [name for name in names if name in ("program", "<module>", "work")] == frames
    assert [call.op for call in flow.calls[0]] == ["all_reduce"]


def test_the_reader_knows_the_format_that_the_recorder_writes() -> None:
    names = ("MAGIC", "LINE", "ENTER", "LEAVE", "SET", "READ", "RAISED", "CALL", "CODE", "HELD", "RESUME", "PAUSE")
    assert [getattr(reading, name) for name in names] == [getattr(written, name) for name in names]


def test_a_full_log_keeps_the_newest_events_and_the_open_frames(tmp_path: Path) -> None:
    def program(rank: int, call: Callable[..., None]) -> None:
        programs.makes_more_passes(rank, call)
        for _ in range(300):
            programs.skips_a_batch(rank, call)

    flow = record(program, tmp_path, 0, size=1 << 15)
    assert flow.is_cut
    assert sum(map(len, flow.calls.values())) == 7 + 300 * 5
    assert flow.calls[0][-1].op == "all_reduce"


def test_ranks_part_after_more_events_than_a_log_keeps(tmp_path: Path) -> None:
    def program(rank: int, call: Callable[..., None]) -> None:
        for _ in range(400 + 20 * rank):  # other numbers of lines, so that the logs keep other calls
            sum(range(rank))
        for _ in range(200):
            programs.fits_though_one_rank_logs(rank, call)
        programs.makes_more_passes(rank, call)

    flows = [record(program, tmp_path, rank, size=1 << 15) for rank in range(RANKS)]
    assert all(flow.is_cut for flow in flows)
    found = find_first(flows, lambda group: range(RANKS))
    assert (found.kind, found.exceptional) == ("loop", (1,))
    assert found.where.endswith("in makes_more_passes")


def test_a_damaged_log_is_read_up_to_its_damage(tmp_path: Path) -> None:
    record(programs.makes_more_passes, tmp_path, 0)
    path = tmp_path / "makes_more_passes0.bin"
    data = bytearray(path.read_bytes())
    data[400:] = b"\xff" * (len(data) - 400)
    path.write_bytes(data)
    flow = read_flow(path, 0)
    assert flow is None or flow.roots
    path.write_bytes(b"NSAFLOW1")
    assert read_flow(path, 0) is None


class Held:
    __slots__ = ("empty", "slot")
    of_class = 3
    method = print

    def __init__(self) -> None:
        self.slot = 4

    @property
    def computed(self) -> int:
        raise AssertionError("a property was run")


@pytest.mark.parametrize(
    ("chain", "value"),
    [("held.slot", 4), ("held.of_class", 3), ("Held.of_class", 3), ("held.computed", ABSENT), ("held.empty", ABSENT)],
)
def test_the_attributes_that_are_read_without_running_code(chain: str, value: object) -> None:
    assert find(chain, {"held": Held()}, {"Held": Held}) == value
