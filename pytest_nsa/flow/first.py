"""The first divergence of a test's ranks: the statement at which they parted, what each did there, and why."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pytest_nsa.flow.align import (
    COLLECTIVES,
    KEYS,
    MESSAGES,
    Members,
    Pair,
    Parting,
    list_numbers,
    list_set_values,
    name_key,
)
from pytest_nsa.flow.read import MAIN, Call, Flow, Frame
from pytest_nsa.flow.reasons import (
    BY_RANK,
    RAISED,
    RANK,
    Step,
    differing,
    is_library,
    place,
    reads_rank_alone,
    side,
    trace_back,
)
from pytest_nsa.flow.rounds import find_in_rounds, find_unended_wait, list_methods
from pytest_nsa.flow.source import read_source

MOST_PAIRS = 64
MOST_OTHERS = 4  # ranks with which one is compared, as each difference of two counts
_EXCLUDES = re.compile(r"!=|\bnot\b")


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The statement at which ranks parted. ``kind``: branch, loop, callee, exception or argument.

    ``where`` is the user's line; ``within`` that of a library which it called, '' where the ranks parted in the user's code.
    ``outcomes`` has the ranks by what they did there; ``values`` the names that it reads and that differ, by rank;
    ``because`` the lines that set these, backwards. ``is_alone``: ranks that did the same there part nowhere else. ``inside`` are
    the ranks that begin calls in the statement, not behind it. ``then`` has by rank what follows: the place, and 'begins OP' or
    'raises ERROR'. ``raised_before`` are the ranks that had raised before their first other call,
    or in another thread. ``others`` has ranks that no call there concerns, by the outcome that they had in the same execution.
    ``outcome_before`` and ``values_before``: what the rank did in the round before, where it is compared with itself.
    """

    kind: str
    where: str
    statement: str
    outcomes: dict[str, tuple[int, ...]]
    values: dict[str, dict[int, str]] = field(default_factory=dict)
    because: tuple[Step, ...] = ()
    within: str = ""
    is_alone: bool = True
    inside: tuple[int, ...] = ()
    then: dict[int, tuple[str, str]] = field(default_factory=dict)
    raised_before: tuple[int, ...] = ()
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outcome_before: str = ""
    values_before: dict[str, str] = field(default_factory=dict)

    @property
    def is_by_rank(self) -> bool:
        """Whether ranks part by a value that follows from their numbers."""
        return any(map(RANK.search, self.values)) or any(step.by_right == BY_RANK for step in self.because)

    @property
    def is_by_role(self) -> bool:
        """Whether ranks part by their numbers themselves, or by a flag that these set: each has a part in the program."""
        is_flag = all(RANK.search(step.name) or set(step.values) <= {"True", "False"} for step in self.because)
        return is_flag and self.is_by_rank

    @property
    def unlike_others(self) -> tuple[int, ...]:
        """The ranks of the outcome that no rank outside of their calls had, where another outcome was had; else ()."""
        alone = [ranks for outcome, ranks in self.outcomes.items() if outcome not in self.others]
        return alone[0] if self.others and len(alone) == 1 else ()

    @property
    def exceptional(self) -> tuple[int, ...]:
        """The ranks of the rarer outcomes; () where there is no majority."""
        most = max(map(len, self.outcomes.values()))
        rare = [ranks for ranks in self.outcomes.values() if len(ranks) < most]
        return tuple(sorted({*itertools.chain.from_iterable(rare)}))  # pairs of ranks may part in several ways

    @property
    def raising(self) -> tuple[int, ...]:
        """The ranks that raised what others did not."""
        raised = [ranks for text, ranks in self.outcomes.items() if text.startswith(RAISED)]
        return raised[0] if self.kind == "exception" and len(raised) == 1 < len(self.outcomes) else ()

    @property
    def in_role(self) -> tuple[int, ...]:
        """The ranks that begin calls inside a statement that selects them by their number, or by a flag that it sets; else ().

        A statement that excludes ranks (``!=``, ``not``) selects none.
        """
        is_part = len(self.inside) < sum(map(len, self.outcomes.values()))
        excludes = _EXCLUDES.search(self.statement) is not None
        is_role = self.is_by_role and is_part and not excludes and self.kind in ("branch", "callee")
        return self.inside if is_role else ()

    def below(self, root: str) -> FirstDivergence:
        """Return it with paths relative to a folder, '' for none, so that it reads the same on every machine."""
        prefix = root.rstrip("/") + "/"
        steps = (replace(step, where=step.where.removeprefix(prefix)) for step in self.because)
        found = replace(
            self, where=self.where.removeprefix(prefix), within=self.within.removeprefix(prefix), because=tuple(steps)
        )
        then = {rank: (where.removeprefix(prefix), text) for rank, (where, text) in self.then.items()}
        return replace(found, then=then) if root else self

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FirstDivergence:
        """Build it from what `to_json` returned, as JSON reads it."""
        return cls(
            kind=data["kind"],
            where=data["where"],
            statement=data["statement"],
            outcomes={name: tuple(ranks) for name, ranks in data["outcomes"].items()},
            values={name: {int(r): v for r, v in of.items()} for name, of in data["values"].items()},
            because=tuple(Step(**{**step, "values": tuple(step["values"])}) for step in data["because"]),
            within=data["within"],
            is_alone=data["is_alone"],
            inside=tuple(data.get("inside", ())),
            then={int(rank): (where, text) for rank, (where, text) in data.get("then", {}).items()},
            raised_before=tuple(data.get("raised_before", ())),
            others={name: tuple(ranks) for name, ranks in data.get("others", {}).items()},
            outcome_before=str(data.get("outcome_before", "")),
            values_before={str(name): str(text) for name, text in data.get("values_before", {}).items()},
        )


def find_first(
    flows: Sequence[Flow],
    members: Members,
    stuck: Iterable[Sequence[int]] = (),
    kinds: frozenset[str] = COLLECTIVES,
    is_wanted: Callable[[Parting], bool] = lambda parting: True,
) -> FirstDivergence | None:
    """Return where the ranks of ``flows`` parted first; None where no two of them did, or where it cannot be seen.

    ``members`` returns the ranks of a group by its name; ``stuck`` are the ranks of each call that cannot complete. Without any,
    all ranks are compared. ``kinds`` are those of the calls that must match. Partings for which ``is_wanted`` returns false do not
    count.
    """
    by_rank = {flow.rank: flow for flow in with_equal_begins(flows)}
    found: list[tuple[Parting, Pair]] = []
    for one, other in list(_pairs(sorted(by_rank), list(stuck)))[:MOST_PAIRS]:
        pair = Pair(by_rank[one], by_rank[other], members, kinds)
        parting = pair.part()
        if parting is not None and is_wanted(parting) and not _is_in_role(parting, pair):
            found.append((_find_in_forward(parting, pair), pair))
    if not found:
        return None
    # Ranks of one part show more than those of two. Who sends, receives or sets keys parts by right.
    of_one_part = [f for f in found if not (_is_by_rank(*f) or _calls_other_code(f[0]))]
    found = of_one_part or (found if kinds == COLLECTIVES else [])
    if not found:
        return None
    number = Counter(parting.statement for parting, _ in found)
    first = min(found, key=lambda f: (_count_calls(f), -number[f[0].statement]))[0].statement
    here = [(parting, pair) for parting, pair in found if parting.statement == first]
    described = _described(here, [pair for parting, pair in found if parting.statement != first])
    return described if described.exceptional else replace(described, others=_list_others(*here[0], by_rank, described))


def _find_in_forward(parting: Parting, pair: Pair) -> Parting:
    """Return the decision before a backward pass that calls other hooks: these follow from what the forward pass used.

    The latest one in a module's ``forward``, else the first one since the last call that both ranks began, else the latest. Return
    ``parting`` for another statement, and where there is no decision.
    """
    if parting.kind != "callee" or "backward" not in list_methods(parting.source.statement(parting.line)):
        return parting
    earlier = [p for p in _list_earlier(parting, pair) if p.kind in ("branch", "loop") or _is_answer(p)]
    earlier = [p for p in earlier if not _is_by_rank(p, pair)]
    in_forward = [p for p in earlier if any(frame.name == "forward" for frame in p.frames[0].list_open())]
    begun = _count_calls((parting, pair))
    since = [p for p in earlier if _count_calls((p, pair)) == begun]
    return (in_forward[-1:] or since[:1] or earlier[-1:] or [parting])[0]


def _is_answer(parting: Parting) -> bool:
    """Return whether a function returned, or a line set, true on one rank and false on another: `a if x else b` decides by it."""
    answers: list[list[str | None]] = [
        [f.returned for f in parting.frames],
        *list_set_values(parting.frames, parting.at),
    ]
    return any({*texts} == {"True", "False"} for texts in answers)


def _is_in_role(parting: Parting, pair: Pair) -> bool:
    """Return whether ranks do other things by their numbers, and one has begun no call since: they may meet behind it."""
    flows = pair.one, pair.other
    return _is_by_rank(parting, pair) and any(
        frame.is_open and not pair.shared(flow, frame.list_calls(at))
        for flow, frame, at in zip(flows, parting.frames, parting.at, strict=True)
    )


def _is_by_rank(parting: Parting, pair: Pair) -> bool:
    """Return whether the statement reads the number of a rank, and two ranks part there by it."""
    by_value = any(map(RANK.search, differing(parting, (pair.one, pair.other))))
    return by_value or reads_rank_alone(parting.source.head(parting.line))


def _calls_other_code(parting: Parting) -> bool:
    """Return whether a statement called other functions on the two ranks, as of objects of two classes."""
    sides = [
        {child.function for child in frame.children.get(at, ())}
        for frame, at in zip(parting.frames, parting.at, strict=True)
    ]
    return parting.kind == "callee" and all(sides) and sides[0].isdisjoint(sides[1])


def passes_a_call(parting: Parting) -> bool:
    """Return whether one rank has executed a statement without calling anything, in which another waits for more than one rank."""
    frames = tuple(zip(parting.frames, parting.at, strict=True))
    is_passed = any(
        not frame.children.get(at) and not frame.calls.get(at) and at + 1 < len(frame.lines) for frame, at in frames
    )
    waits = any(
        frame.is_open
        and at + 1 == len(frame.lines)
        and all(c.kind in COLLECTIVES for c in frame.calls.get(at, ())[-1:])
        for frame, at in frames
    )
    return parting.kind == "callee" and is_passed and waits


def find_owed(
    flows: Sequence[Flow],
    members: Members,
    awaited: Sequence[tuple[int, Call]],
    ranks: Sequence[int],
    *,
    by_peer: bool = False,
) -> FirstDivergence | None:
    """Return where one of ``ranks`` did not begin its half of a message, or did not set a key; None where it cannot be seen.

    ``awaited`` has each rank that waits, and the call in which it does. The rank is compared with itself in the round before, and
    with the others that made such calls more often. ``by_peer``: also the rank that a message names, whatever ``ranks`` are.
    """
    for (waiting, call), flow in itertools.product(awaited, flows):
        is_named = call.peer == flow.rank
        if (
            flow.rank == waiting
            or not (is_named or call.peer < 0)
            or not (flow.rank in ranks or (by_peer and is_named))
        ):
            continue
        is_owed = functools.partial(_is_half, call, waiting)
        made = _list_made(flow, is_owed)
        before = [c for c in made if c.kind not in KEYS or list_numbers(c) < list_numbers(call)]
        in_rounds = find_in_rounds(flow, before[-1], is_owed, members) if before else None
        if in_rounds is not None:
            return _describe_rounds(*in_rounds)
        pairs = [
            Pair(flow, other, members, is_owed=is_owed)
            for other in flows
            if other.rank not in (flow.rank, waiting) and len(_list_made(other, is_owed)) > len(made)
        ]
        described = _describe_shared([(pair.part(), pair) for pair in pairs])
        if described is not None:
            return None if described.is_by_role else described
    return None


def _describe_shared(found: Sequence[tuple[Parting | None, Pair]]) -> FirstDivergence | None:
    """Return the statement at which all pairs part; None where one of them does not, or parts at another statement."""
    here = [(parting, pair) for parting, pair in found if parting is not None]
    is_one = len(here) == len(found) and len({parting.statement for parting, _ in here}) == 1
    return _described(here, []) if is_one else None


def _list_made(flow: Flow, is_owed: Callable[[Call], bool]) -> list[Call]:
    """Return the calls of a rank for which ``is_owed`` returns true, those of a thread in their order."""
    return [call for calls in flow.calls.values() for call in calls if is_owed(call)]


def _is_half(awaited: Call, waiting: int, call: Call) -> bool:
    """Return whether a call is like the one that a waiting rank lacks: the other half of its message, or such a key."""
    if awaited.kind in KEYS:
        return call.kind == "set" and name_key(call) == name_key(awaited)
    return call.kind in MESSAGES and call.kind != awaited.kind and call.peer == waiting


def _describe_rounds(parting: Parting, pair: Pair) -> FirstDivergence:
    """Return where the later round of a rank parts from the one before."""
    rank = pair.one.rank
    found = _described([(parting, pair)], [])
    values = differing(parting, (pair.one, pair.other))
    return replace(
        found,
        outcomes={side(parting, 1): (rank,)},
        inside=(),
        then={},
        values={name: {rank: texts[1]} for name, texts in values.items()},
        outcome_before=side(parting, 0),
        values_before={name: texts[0] for name, texts in values.items()},
    )


def find_unended(flows: Sequence[Flow], members: Members, odd: Sequence[int]) -> FirstDivergence | None:
    """Return where one of ``odd`` ranks, which wait for a thread or a lock, did not do what ended such waits before."""
    found = (find_unended_wait(flow, members) for flow in flows if flow.rank in odd)
    in_rounds = next(filter(None, found), None)
    return None if in_rounds is None else replace(_describe_rounds(*in_rounds), is_alone=False)


def find_last_decision(flows: Sequence[Flow], members: Members, odd: Sequence[int]) -> FirstDivergence | None:
    """Return the last branch or loop in which ``odd`` ranks, which wait for no other, differ from all others, by their values.

    None where others differ there, too, or where it is chosen by the number of the rank. It explains a verdict and changes none.
    """
    by_rank = {flow.rank: flow for flow in flows}
    others = [rank for rank in sorted(by_rank) if rank not in odd][:MOST_OTHERS]
    if len(others) < 2 or not set(odd) <= by_rank.keys():
        return None
    by_right = _list_differing(by_rank, others, members)
    for one in odd:
        sides = [
            [(p, pair) for p in _noted(pair) if p.kind in ("branch", "loop") and p.statement not in by_right]
            for pair in (Pair(by_rank[one], by_rank[other], members, notes_all=True) for other in others)
        ]
        shared = set.intersection(*({p.statement for p, _ in of} for of in sides))
        last = [next(f for f in reversed(of) if f[0].statement in shared) for of in sides if shared]
        described = _describe_shared(last)
        if described is not None:
            return None if described.is_by_role else replace(described, is_alone=False)
    return None


def _list_differing(by_rank: Mapping[int, Flow], ranks: Sequence[int], members: Members) -> set[object]:
    """Return the statements in which two of some ranks differ."""
    return {
        parting.statement
        for one, other in list(itertools.combinations(ranks, 2))[:MOST_PAIRS]
        for parting in _noted(Pair(by_rank[one], by_rank[other], members, notes_all=True))
    }


def _list_others(
    parting: Parting, pair: Pair, by_rank: Mapping[int, Flow], found: FirstDivergence
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that no call there concerns and that did as one of two sides, in the same execution, by its outcome."""
    outside = sorted(by_rank.keys() - set(itertools.chain.from_iterable(found.outcomes.values())))
    sides: defaultdict[str, list[int]] = defaultdict(list)
    for rank in outside[:MOST_PAIRS]:
        flows = pair.one, pair.other
        differs = [
            _differ_there(replace(pair, one=flow, other=by_rank[rank]), parting, k) for k, flow in enumerate(flows)
        ]
        if differs[0] != differs[1]:
            sides[side(parting, differs.index(False))].append(rank)
    return {outcome: tuple(ranks) for outcome, ranks in sides.items()}


def _differ_there(pair: Pair, parting: Parting, which: int) -> bool:
    """Return whether the first rank of a pair parted from the second one in the execution of a statement."""
    there = parting.frames[which].number, parting.at[which]
    return any((p.frames[0].number, p.at[0]) == there and p.kind != "value" for p in _note_all(pair))


def list_other_values(flows: Sequence[Flow], members: Members, odd: Sequence[int]) -> Iterator[FirstDivergence]:
    """Yield the statements that the ``odd`` ranks executed otherwise than the others, or that set another value there, in order.

    Where two of the others differ, too, ranks differ by right. Without a second other rank, control flow alone counts.
    """
    by_rank = {flow.rank: flow for flow in flows}
    others = [rank for rank in sorted(by_rank) if rank not in odd]
    if not others:  # two ranks, or no majority
        odd, others = odd[:1], list(odd[1:2])
    by_right = _list_differing(by_rank, others, members)
    for one in odd:
        pairs = [Pair(by_rank[one], by_rank[other], members, notes_all=True) for other in others[:MOST_OTHERS]]
        noted = [_noted(pair) for pair in pairs]
        for parting in next(iter(noted), []):
            is_known = parting.kind != "value" or len(others) > 1
            if is_known and parting.statement not in by_right:  # the others do not differ there
                alike = [[p for p in of if p.statement == parting.statement][:1] for of in noted]
                yield _described([(p, pair) for of, pair in zip(alike, pairs, strict=True) for p in of], [])


def _noted(pair: Pair) -> list[Parting]:
    """Return the differences of two ranks, in their order."""
    last = pair.part()
    return [*pair.noted, *([last] if last is not None else [])]


def _note_all(pair: Pair) -> list[Parting]:
    """Return all differences of two ranks, by another alignment."""
    return _noted(replace(pair, notes_all=True, noted=[]))


def _list_earlier(parting: Parting, pair: Pair) -> list[Parting]:
    """Return the differences of two ranks before a statement: those that changed no call."""
    return list(itertools.takewhile(lambda other: other != parting, _note_all(pair)))


def _count_calls(found: tuple[Parting, Pair]) -> int:
    """Return how many calls of both ranks had begun before they parted."""
    parting, pair = found
    frame, at = parting.frames[0], parting.at[0]
    begun = frame.begun_at + len(frame.list_calls(-1, at))
    return len(pair.shared(pair.one, pair.one.calls.get(frame.thread, [])[:begun]))


def with_equal_begins(flows: Sequence[Flow]) -> list[Flow]:
    """Return flows that begin at the same call, where a log kept only its newest events; [] where no call is in all of them."""
    if not any(flow.is_cut for flow in flows):
        return list(flows)
    first = max(flow.first_kept(MAIN) for flow in flows)
    is_in_all = all(len(flow.calls.get(MAIN, ())) > first for flow in flows)
    return [flow.from_call(MAIN, first) for flow in flows] if is_in_all else []


def _pairs(ranks: Sequence[int], stuck: Sequence[Sequence[int]]) -> Iterable[tuple[int, int]]:
    for one, other in itertools.combinations(ranks, 2):
        if not stuck or any(one in group and other in group for group in stuck):
            yield one, other


def _described(here: Sequence[tuple[Parting, Pair]], elsewhere: Sequence[Pair]) -> FirstDivergence:
    outcomes: defaultdict[str, set[int]] = defaultdict(set)
    values: defaultdict[str, dict[int, str]] = defaultdict(dict)
    inside: set[int] = set()
    then: dict[int, tuple[str, str]] = {}
    raised_before: set[int] = set()
    for parting, pair in here:
        ranks = pair.one.rank, pair.other.rank
        for which, rank in enumerate(ranks):
            outcomes[side(parting, which)].add(rank)
            call = pair.first_inside(parting, which)
            if _has_raised_before(parting, which, (pair.one, pair.other)[which], call):
                raised_before.add(rank)
            if call is not None:
                inside.add(rank)
            followed = _followed(parting, which, (pair.one, pair.other)[which], call)
            if followed is not None:
                then[rank] = followed
        for name, texts in differing(parting, (pair.one, pair.other)).items():
            values[name].update(zip(ranks, texts, strict=True))
    # Ranks of one side that part at another statement, where neither is of the rarer outcome.
    sides = sorted(outcomes.values(), key=len)[1:]
    others = [p for p in elsewhere if any({p.one.rank, p.other.rank} <= ranks for ranks in sides)]
    parting, pair = here[0]
    frame, at = parting.frames[0], parting.at[0]
    within, shown = "", frame
    line = parting.line
    if is_library(frame.file):
        within = f"{place(frame, line)}: {parting.source.head(line)}"
        caller, caller_at = _user_frame(frame, at)
        if caller is not None:
            shown, line = caller, caller.lines[caller_at]
    return FirstDivergence(
        kind=parting.kind,
        where=place(shown, line),
        statement=read_source(shown.file).head(line),
        outcomes={name: tuple(sorted(ranks)) for name, ranks in sorted(outcomes.items())},
        values={name: dict(sorted(of.items())) for name, of in values.items()},
        because=tuple(trace_back(parting, (pair.one, pair.other), lambda: _list_earlier(parting, pair))),
        within=within,
        is_alone=not others,
        inside=tuple(sorted(inside)),
        then=dict(sorted(then.items())),
        raised_before=tuple(sorted(raised_before)),
    )


def _has_raised_before(parting: Parting, which: int, flow: Flow, call: Call | None) -> bool:
    """Return whether a rank raised before its first other call, or in another thread: an exception that may have led to it."""
    frame, at = parting.frames[which], parting.at[which]
    raised = [(other, k) for other, k in flow.raised if not other.raised[k].startswith("Stop")]
    if flow.frames.get(frame.number) is not frame:  # a part of a frame, where the log was full: its order is not known
        return bool(raised)
    begins = flow.frames.get(call.place[0]) if call is not None else None
    there = frame.get_position(at) if begins is None or call is None else begins.get_position(call.place[1])
    for other, k in raised:
        position = other.get_position(k)
        is_around = there[: len(position)] == position  # a caller's line goes on when the call has ended
        if other.thread != frame.thread or (position < there and not is_around):
            return True
    return False


def _followed(parting: Parting, which: int, flow: Flow, call: Call | None) -> tuple[str, str] | None:
    """Return what a rank did next in the frame where it parted: the place and the text of an exception, or of its first call."""
    frame, at = parting.frames[which], parting.at[which]
    raised = next((k for k, text in sorted(frame.raised.items()) if k > at and not text.startswith("Stop")), None)
    called = next((k for k in sorted(frame.calls) if k > at), None)
    # What a call of it raises follows from the other ranks.
    if raised is not None and parting.kind == "branch" and (called is None or raised < called):
        return place(frame, frame.lines[raised]), f"raises {frame.raised[raised]}"
    begins = flow.frames.get(call.place[0]) if call is not None else None
    caller, index = _user_frame(begins, call.place[1]) if begins is not None and call is not None else (None, -1)
    return (
        (place(caller, caller.lines[index]), f"begins {call.op}") if caller is not None and call is not None else None
    )


def _user_frame(frame: Frame, at: int) -> tuple[Frame | None, int]:
    """Return the innermost frame of the user's at or above a library's, and the index of its line."""
    found: Frame | None = frame
    while found is not None and is_library(found.file):
        at, found = found.above_at, found.above
    return (found, at) if found is not None and 0 <= at < len(found.lines) else (None, -1)
