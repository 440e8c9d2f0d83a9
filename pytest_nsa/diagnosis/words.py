"""What a finding states, in words. No verdict depends on them: a cause, its ranks and its line are decided before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from pytest_nsa.diagnosis.explain.choose import Explanation
from pytest_nsa.diagnosis.explain.edits import Calls
from pytest_nsa.diagnosis.explain.keys import TERMS as KEYS
from pytest_nsa.diagnosis.explain.keys import get_key
from pytest_nsa.diagnosis.explain.locations import split_place
from pytest_nsa.diagnosis.explain.message_terms import MESSAGE
from pytest_nsa.diagnosis.explain.messages import END, KEY
from pytest_nsa.diagnosis.explain.source import find_loops, polled_condition
from pytest_nsa.diagnosis.explain.terms import OWN, SHARED
from pytest_nsa.diagnosis.facts import doing, racing, user_frame
from pytest_nsa.diagnosis.verdict import by_ranks, describe_ranks, stated
from pytest_nsa.evidence.board import DEFAULT_GROUPS, Collective
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence, RankEvidence

# CUDA's own text, which is the same for every kernel.
_LATE = ("cuda error", "cuda kernel errors might be asynchronously reported", "device-side assert")
_MOST_TERMS = 4  # that a verdict prints
# By side of the ranks, and for '' of both together, the words of each term.
_WORDS: dict[str, dict[str, str]] = {
    "waiter": {t.name: t.words for t in MESSAGE}, "asker": {t.name: t.words for t in KEYS},
    "they": {t.name: t.words for t in OWN}, "": {t.name: t.words for t in SHARED},
}  # fmt: skip
_OF_ALL = {t.name: t.of_all for t in SHARED if t.of_all}
_WORDS |= {"peer": _WORDS["waiter"], "setter": _WORDS["asker"], "others": _WORDS["they"]}
_AWAITED = (  # by file and function of the library, and by source where it has no frame of Python
    ("/queue.py", "get", r"\.get\(", "an item that no thread has put into its queue"),
    ("/queue.py", "put", r"\.put\(", "room in a queue from which no thread has taken"),
    ("/queue.py", "join", r"$^", "the tasks of a queue, which no thread has completed"),
    ("/concurrent/futures/_base.py", "result", r"\.result\(", "a result that no thread has delivered"),
    ("/threading.py", "join", r"\.join\(", "a thread that has not ended"),
    ("/threading.py", "acquire", r"$^", "a semaphore that no thread has released"),
    ("/threading.py", "wait", r"\.wait\(", "an event or a condition that no thread has set"),
)


def each_call(calls: Calls, world_size: int, *, with_steps: bool = False) -> str:
    """Return the call of each rank, without ranks that ended: 'ranks 0 and 1 in barrier #4 at ...; rank 2 in ...'."""
    texts = {}
    for rank, call in sorted(calls.items()):
        text = (
            f"waiting for the key {call.note} of a store at {call.site}" if call.op == KEY else f"in {call.describe()}"
        )
        if call.op != END:
            texts[rank] = text + (f" in step {call.step}" if with_steps else "")
    return by_ranks(texts, world_size)


def members_of_groups(evidence: Evidence, calls: Calls) -> str:
    """Return '; group 4 has ranks 2 and 3' for each group of the calls but the default one."""
    groups = sorted({c.group for c in calls.values() if c.op != END} - set(DEFAULT_GROUPS))
    return "".join(f"; group {g} has {describe_ranks(evidence.members(g), evidence.job.world_size)}" for g in groups)


def describe_awaited(evidence: Evidence, ranks: tuple[int, ...], calls: Calls, *, instead_of: str = "") -> str:
    """Return what the awaited ranks do, 'ended its test' or 'waits in ...'."""
    n = evidence.job.world_size
    if all(calls[r].op == END for r in ranks if r in calls):
        without = f" without {instead_of}" if instead_of else ""
        return f"{describe_ranks(ranks, n)} ended {'its test' if len(ranks) == 1 else 'their tests'}{without}"
    return by_ranks({r: f"waits {doing(evidence.ranks[r])}" for r in ranks}, n)


def list_terms(found: Explanation, world_size: int) -> dict[str, float]:
    """Return the terms of the largest weight as sentences about the side that each describes, with their weights."""
    of_all = _OF_ALL if found.candidate.is_for_all else {}
    shown = [(name, of_all.get(name) or _get_words(name), gain) for name, gain in found.terms]
    shown = [(name, words, gain) for name, words, gain in shown if words][:_MOST_TERMS]
    return {stated(found.candidate.about(name), words, world_size): gain for name, words, gain in shown}


def _get_words(name: str) -> str:
    """Return the words of a term. ``name`` is its name in the table of weights."""
    side, _, bare = name.partition(": ")
    return _WORDS.get(side, _WORDS[""]).get(bare or side, "")


def because(terms: Mapping[str, float]) -> str:
    """Return the two terms of the largest weight after a semicolon; '' without any."""
    return "".join(f"; {sentence}" for sentence in itertools.islice(terms, 2))


def waits_for_a_key(rank: RankEvidence) -> str:
    """Return that a rank waits for a key, and which."""
    key = get_key(rank)
    return f"waits for a key of a store that no rank has set{f': {key}' if key else ''}"


A_GROUP_A_THREAD = "give the thread a separate group: calls of two threads have no order in one"


def race_of_threads(evidence: Evidence, entered: Mapping[int, Collective]) -> str:
    """Return in words that threads of the ranks race (`facts.racing`); '' where they do not."""
    aside = racing(evidence, entered)
    if not aside:
        return ""
    who, does = describe_ranks(aside, evidence.job.world_size), "calls" if len(aside) == 1 else "call"
    functions = {split_place(place)[2] for rank in aside for place in entered[rank].lines[:1]} - {""}
    names = f" ({' and '.join(sorted(functions))})" if functions else ""
    rest = describe_ranks(tuple(sorted(entered.keys() - {*aside})), evidence.job.world_size)
    return f"; {who} {does} in a side thread{names}, {rest} in the main thread: one group, so the order is a race"


def exhausted_loaders(evidence: Evidence, culprits: tuple[int, ...], cause: str) -> str:
    """Return that the culprits' data loaders were exhausted, and gave fewer batches than another rank has received; else ''."""
    numbers = {r.rank: r.board.numbers for r in evidence.ranks if r.board is not None}
    ended, batches = ({r: n.get(name, 0.0) for r, n in numbers.items()} for name in ("loaders_ended", "batches"))
    others = [rank for rank in numbers if rank not in culprits]
    if cause != "skipped_collective" or not others or not numbers.keys() >= set(culprits):
        return ""
    most_ended, most_batches = (max(of[o] for o in others) for of in (ended, batches))
    if not all(ended[r] > most_ended and batches[r] < most_batches for r in culprits):
        return ""
    return f"; the data loader of {describe_ranks(culprits, evidence.job.world_size)} ran out of data: uneven batches"


def step_that_differs(kind: str, event: Mapping[str, object]) -> str:
    """Return the plan's reason for what a rank did in a step and others did not, with details."""
    if kind == "forward_failed":
        return f"forward aborted by a swallowed exception in {event.get('module') or 'the model'}: {event.get('error')}"
    if kind == "not_synchronised":
        return "gradients not reduced (no_sync)"
    return "batch skipped, no backward" if event.get("finite", True) else "batch skipped after NaN, no backward"


def describe_rate(evidence: Evidence) -> str:
    """Return the steps that all ranks made, and the time of a step; of a backward without a step before, its progress."""
    boards = [r.board for r in evidence.ranks if r.board is not None]
    steps = min((b.numbers["step"] for b in boards), default=0.0)
    seconds = max(evidence.stop_time - evidence.started, 1e-9)
    if steps > 1:
        return f"{steps:.0f} steps in {seconds:.1f} s, {seconds / steps:.2f} s a step"
    in_backward = next((r for r in evidence.ranks if r.board is not None and r.board.phase == "backward"), None)
    return describe_progress(in_backward) if in_backward else f"no whole step in {seconds:.1f} s"


def describe_progress(rank: RankEvidence) -> str:
    """Return how far a backward has come and how long it still needs, by the heartbeats of the step."""
    assert rank.board is not None
    n = rank.board.numbers
    arrived, expected = n["gradients"], n["gradients_expected"]
    beats = [b for b in rank.heartbeats if b["phase"] == "backward" and b["step"] == n["step"]]
    if rank.board.phase != "backward" or not beats:
        return f"{rank.board.phase} of step {n['step']:.0f}"
    seconds = n["beat_time"] - beats[0]["time"]
    text = f"backward of step {n['step']:.0f} has produced {arrived:.0f} of {expected:.0f} gradients in {seconds:.1f} s"
    if 0 < arrived < expected:
        text += f", {arrived / max(seconds, 1e-9):.2g} a second: about {seconds * (expected - arrived) / arrived:.0f} s to go"
    return text


def in_symbol(rank: RankEvidence) -> str:
    """Return the native function that a rank is in, in brackets; '' where it is unknown."""
    return f" ({rank.native_symbol})" if rank.native_symbol else ""


def who_holds(rank: RankEvidence, holders: Sequence[int]) -> str:
    """Return which rank holds the lock that a rank waits for; '' where it is unknown."""
    if rank.rank in holders:
        return ", which it holds itself"
    return f", which rank {holders[0]} holds" if holders else ""


def polled(rank: RankEvidence) -> tuple[str, str]:
    """Return why a rank sleeps in a loop, and an advice: the exception after which it tries again (', and handles KeyError: 3'), or
    the loop's condition (', while `not self.buffer`'); ('', '') without either.

    Where a condition is in memory, and the rank has no other thread and no child, nothing in the rank can change it.
    """
    frame, handled = user_frame(rank), rank.handles
    place = frame.describe() if frame is not None else ""
    if handled is not None and handled.inside == place and find_loops(rank.sources, place):
        advice = f"find why {handled.at} fails each time: the sleep is a pause between two tries"
        return f", and handles {handled.text}", advice
    condition, is_of_memory = polled_condition(rank.sources, place) if place else ("", False)
    if not condition:
        return "", ""
    others = [t for t in rank.threads if not (t.is_main or t.is_ours)]
    is_alone = is_of_memory and bool(rank.threads) and not others and not rank.process.get("children")
    alone = ", which no other thread of the rank is there to change" if is_alone else ""
    advice = f"find what should end `{condition}`, and why it did not: the sleep is a pause of that loop"
    return f", while `{condition}`{alone}", advice


def describe_inner_wait(frames: Sequence[Frame], source: str) -> str:
    """Return what a rank waits for within its process. ``frames`` are those that its innermost line ``source`` called."""
    for file, function, pattern, words in _AWAITED:
        by_frame = any(f.file.endswith(file) and f.function == function for f in frames)
        if by_frame or (not frames and re.search(pattern, source)):
            return words
    return "a lock that has not been released"


def late_hint(message: str) -> str:
    """Return what to do where a message is CUDA's report of an error in an earlier call; '' for any other message."""
    if not any(words in message.lower() for words in _LATE):
        return ""
    return "; CUDA reports an error later than the call that failed: CUDA_LAUNCH_BLOCKING=1 names the line that launched it"
