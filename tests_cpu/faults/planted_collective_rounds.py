"""Rounds of collectives in a bare process group: one rank makes a round or a call once more or once less."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


@planted(
    "skipped_collective",
    [0],
    n=3,
    marked=True,
    reason="off by one call since barrier #12",
    family="skip",
    origin="generated 2026-11-23",
)
def test_the_last_barrier_is_like_the_round_s(group):
    loss = torch.ones(1)
    for step in range(6):
        dist.all_gather([torch.empty(1) for _ in range(3)], loss)
        dist.all_reduce(loss)
        if (group.rank, step) == (0, AT):
            break
        dist.barrier()  # HERE
    dist.barrier()


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)  # HERE


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_length_that_is_known_already(group):
    """A cache answers in place of the reduction; the rank comes round the loop past it."""
    longest: dict[int, int] = {}

    def padded(length: int) -> int:
        if length not in longest:
            most = torch.tensor(length)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)  # HERE
            longest[length] = int(most)
        return longest[length]

    grads = [torch.ones(4), torch.ones(2)]
    for length in [3, 4, 5, 4 if group.rank == 1 else 6, 7, 8]:
        padded(length)  # HERE
        average(grads)


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_call_that_is_refused(group):
    """Too few tensors to scatter: the rank that has them gets an exception, and goes on; the others wait."""
    given = torch.empty(1)
    for step in range(6):
        whole = [torch.ones(1)] * (2 if step == AT else 3)
        try:
            dist.scatter(given, whole if group.rank == 0 else None, 0)  # HERE
        except (RuntimeError, ValueError):
            given = torch.zeros(1)
        dist.all_reduce(given)


@planted(
    "skipped_collective",
    [1],
    marked=True,
    reason="went on without broadcast",
    family="skip",
    origin="public reports 2026-11-25",
)
def test_a_plan_is_not_shared_and_its_place_is_taken(group):
    for step in range(5):
        if (group.rank, step) != (1, 2):
            plan = [{"step": step} if group.rank == step % 2 else None]
            dist.broadcast_object_list(plan, src=step % 2)  # HERE
        mine = [None]
        dist.scatter_object_list(mine, [[r, step] for r in range(2)] if group.rank == 0 else None, src=0)
        dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="generated 2026-11-25")
def test_a_reduction_of_the_same_size_takes_the_place_of_one_left_out(group):
    """Neither waits: the two reduce one number each. The latter is of the first epoch's end, which no round tells of."""
    for _ in range(3):
        for step in range(3):
            dist.all_reduce(torch.ones(4))
            if step % 2 == 0 and (group.rank, step) != (1, 2):
                dist.all_reduce(torch.ones(1))  # HERE
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
        dist.barrier()


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_rank_leaves_a_size_out_of_a_list_of_sizes(group):
    """One line, and a size of its own in each round."""
    for rows in (8, 12, 5, 9, 16):
        mine = rows // 4 + (group.rank < rows % 4)
        if mine == 1 and group.rank == 3:
            continue
        whole = [torch.empty((rows + 3) // 4 * 6) for _ in range(4)]
        dist.all_gather(whole, torch.ones((rows + 3) // 4 * 6))  # HERE
    dist.barrier()


@planted("skipped_collective", [2], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_norm_that_a_rank_leaves_out_is_as_small_as_what_follows(group):
    """Calls of one size take each other's place until its test has ended, one call short."""
    for step in range(9):
        if (group.rank, step) != (2, 5):
            dist.all_reduce(torch.ones(1))  # HERE
        if step % 3 == 2:
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MIN)


def reduced() -> torch.Tensor:
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


@planted("extra_collective", [0], marked=True, family="extra", origin="unseen 2026-11-25")
def test_what_all_but_the_first_rank_return_before(group):
    def export(parts: list[torch.Tensor]) -> torch.Tensor | None:
        if group.rank != 0:
            return None
        mine = torch.ones(4)
        dist.all_gather(parts, mine)  # HERE
        return torch.cat(parts)

    for _ in range(3):
        reduced()
    export([torch.empty(4) for _ in range(2)])


@planted("extra_collective", [1, 2], n=5, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_call_at_the_end_of_a_round(group):
    many = torch.ones(100)
    for step in range(6):
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(many)
        if group.rank in (1, 2) and step == AT:
            dist.all_reduce(many)  # HERE


@planted("extra_collective", [1], n=2, marked=True, family="extra", origin="generated 2026-11-25")
def test_a_reduction_more_among_those_begun_together(group):
    for step in range(6):
        begun = []
        for size in (3, 5):
            begun.append(dist.all_reduce(torch.ones(size), async_op=True))
            if (group.rank, step) == (1, AT):
                begun.append(dist.all_reduce(torch.ones(size), async_op=True))  # HERE
        for work in begun:
            work.wait()


@planted(
    "collective_mismatch",
    [0],
    n=3,
    family="swap",
    origin="unseen 2026-11-25",
    miss="the cause: calls that are waited for a step later",
)
def test_calls_that_are_begun_in_another_order_from_a_step_on(group):
    """What a step begins is waited for a step later: all have begun as many calls when they wait."""
    # The lines of the calls tell them from each other, not the line of the wait.
    before: list[dist.Work] = []
    for step in range(6):
        x, parts = torch.ones(16), [torch.zeros(1) for _ in range(3)]
        begin = [
            lambda x=x: dist.all_reduce(x, async_op=True),  # HERE
            lambda parts=parts: dist.all_gather(parts, torch.ones(1), async_op=True),  # HERE
        ]
        if group.rank == 0 and step >= AT:
            begin.reverse()
        begun = [call() for call in begin]
        for work in before:
            work.wait()
        before = begun
    for work in before:
        work.wait()


WANTED = (("a", "b"), ("c",), ("d", "e"), ("a", "f"), ("b",), ("g",))


def serve(group, evicts):
    """What is not cached is broadcast; a rank that ``evicts`` forgets a key that the others keep."""
    known, x = set(), torch.ones(3)

    def fetch(key):
        if key not in known:
            dist.broadcast_object_list([key], 0)  # HERE
            known.add(key)

    for request in range(6):
        for _, key in enumerate(WANTED[request]):
            dist.all_reduce(x)
            fetch(key)
        if group.rank in evicts and request == 2:
            known.discard("a")


@planted("extra_collective", [3], n=4, marked=True, family="extra", origin="caches 2026-11-29")
def test_a_key_that_one_rank_has_evicted(group):
    """The loops' counters show that rank 3 is behind: it has passed no call over."""
    serve(group, evicts=(3,))


@planted("skipped_collective", [2], n=4, marked=True, family="skip", origin="caches 2026-11-29")
def test_a_key_that_all_ranks_but_one_have_evicted(group):
    serve(group, evicts=(0, 1, 3))


class Saved:
    """The steps of two models that are on the disk, as a rank remembers them."""

    def __init__(self):
        self.steps = {"policy": [2, 4], "critic": [2, 4]}

    def save(self, name, step, rank):
        if step % 2 or step in self.steps[name]:
            return
        dist.all_gather_object([None] * dist.get_world_size(), (rank, step))  # HERE
        self.steps[name].append(step)


@planted("extra_collective", [0], n=4, marked=True, family="extra", origin="caches 2026-11-29")
def test_a_list_of_saved_steps_that_one_rank_alone_shortens(group):
    """A model that goes back to an earlier step saves it again, where the rank that shortens its list does; the others pass it over."""
    saved, gradient = Saved(), torch.ones(4)
    for tick in range(8):
        for name, step in (("policy", tick + 1), ("critic", 1 + (tick + 4) % 7)):
            for part in gradient.split(2):
                dist.all_reduce(part)
            saved.save(name, step, group.rank)
        if group.rank == 0:
            saved.steps = {name: steps[-1:] for name, steps in saved.steps.items()}
