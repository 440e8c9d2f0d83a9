"""The verdict: outcome, culprits, cause, evidence and advice. Written as verdict.json, schema 2."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pytest_nsa.evidence.shapes import is_number
from pytest_nsa.evidence.values import Fact as Fact
from pytest_nsa.wire.messages import check_kinds

Outcome = Literal["PASS", "FAIL", "CRASH", "HANG", "SLOW", "SKIP", "INTERRUPTED"]
SCHEMA = 2  # 2: stalled_s, which was stood_still_s
NO_RANK = -1  # the rank of a fact that concerns no rank in particular
FACT_IN_FILE = {"text": "says"}  # fields of a fact with another name in verdict.json
RULE_FAILED = "rule_failed"  # the kind of the fact that one of our rules raised an exception
SECOND_RUN = "second_run"  # of the fact that states what a second run showed


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a rule found: a cause of the registry and its evidence. ``confidence`` is from 0 to 1."""

    cause: str
    ranks: tuple[int, ...]
    reason: str
    where: str = ""
    module: str = ""
    certain: bool = False
    confidence: float = 0.5
    facts: tuple[Fact, ...] = ()
    rule: str = ""  # the rule that found it, by its name in the registry of causes
    called_from: str = ""  # where a rule knows it; else it is taken from the stacks
    advice: str = ""  # replaces the cause's advice
    terms: dict[str, float] = field(default_factory=dict)  # the terms of an explanation, with their weights
    is_permanent: bool = False  # no rank can go on, whatever the cause

    @property
    def ends_the_test(self) -> bool:
        """Whether it is known that the stall never ends."""
        return self.certain or self.is_permanent

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """What identifies a finding: findings with the same key report the same fault, with more or less evidence."""
        return (self.cause, self.ranks, self.where)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What ``ranks`` did at a line of a file; line 0 where no line is known. ``text`` begins with a verb, or is ''."""

    file: str
    line: int
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on a test on ranks. ``cause`` is '' for PASS and SKIP; times in seconds.

    ``expected`` is true where pytest's xfail foresaw the failure; ``rule`` found the cause; ``reads_as`` is what a failure of the
    scenario means by the plan; ``retry`` is 'never', 'once' or 'elsewhere'; ``machines`` has 'rank 3 = node5, GPU 2' per culprit;
    ``called_from`` is the user's line that called the function of ``where``; ``terms`` are the facts that an explanation rests on,
    with how much each counts; ``figures`` are what runs are compared by (`pytest_nsa.observe.conclude`);
    ``first_divergence`` is where the ranks of a second run parted (`pytest_nsa.flow.first`), {} where that is not known.
    ``reason`` is one short statement, ``because`` has further ones; ``labels`` are what the ranks did at which lines.
    """

    scenario: str = ""
    nodeid: str
    outcome: Outcome
    cause: str = ""
    ranks: tuple[int, ...] = ()
    where: str = ""
    module: str = ""
    parameters_missing: tuple[str, ...] = ()
    evidence: tuple[Fact, ...] = ()
    certain: bool = False
    reason: str = ""
    confidence: float = 1.0
    advice: str = ""
    duration_s: float = 0.0
    stalled_s: float = 0.0
    time_to_verdict_s: float = 0.0
    world_size: int = 1
    backend: str = "gloo"
    parallel: str = "none"
    expected: bool = False
    rule: str = ""
    reads_as: str = ""
    retry: str = ""
    machines: tuple[str, ...] = ()
    called_from: str = ""
    terms: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    first_divergence: dict[str, Any] = field(default_factory=dict)
    because: tuple[str, ...] = ()
    labels: tuple[Label, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object that verdict.json holds."""
        evidence = tuple(
            {FACT_IN_FILE.get(name, name): v for name, v in asdict(fact).items()} for fact in self.evidence
        )
        return {"schema": SCHEMA, **asdict(self), "evidence": evidence}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verdict:
        """Build it from what `to_json` returned; keys of a later schema are ignored. Raises ValueError or TypeError for others."""
        if "stood_still_s" in data:  # schema 1
            data = {"stalled_s": data["stood_still_s"], **data}
        check_kinds(cls, data)
        names = set(cls.__dataclass_fields__)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k in names}
        for key in ("figures", "terms"):
            values[key] = {name: n for name, n in data.get(key, {}).items() if is_number(n)}
        values["evidence"] = tuple(map(_fact, values.get("evidence", ())))
        values["labels"] = tuple(map(_label, values.get("labels", ())))
        return cls(**values)

    @property
    def explanation(self) -> str:
        """The reason and the further statements, joined by semicolons."""
        return "; ".join(part for part in (self.reason, *self.because) if part)

    @property
    def stood_still_s(self) -> float:
        """The name that ``stalled_s`` had in schema 1: hooks of other repositories read it."""
        return self.stalled_s

    @property
    def failed(self) -> bool:
        """Whether the test fails by this verdict."""
        return self.outcome not in ("PASS", "SKIP") and not self.expected

    def culprits(self) -> str:
        """'rank 1', 'ranks 0 and 1', 'all 4 ranks' or 'no rank in particular'."""
        return describe_ranks(self.ranks, self.world_size)


def _fact(data: object) -> Fact:
    """Return a fact as verdict.json has it. Raises ValueError or TypeError for others."""
    if not isinstance(data, dict):
        raise ValueError("a fact is no JSON object")
    values = {name: data[key] for name in Fact.__dataclass_fields__ if (key := FACT_IN_FILE.get(name, name)) in data}
    check_kinds(Fact, values)
    return Fact(**values)


def _label(data: dict[str, Any]) -> Label:
    check_kinds(Label, data)
    return Label(file=data["file"], line=data["line"], ranks=tuple(data["ranks"]), text=data["text"])


def describe_ranks(ranks: tuple[int, ...], world_size: int) -> str:
    """Return ranks in words: 'ranks 0-6 and 8'. Runs of more than three ranks are shortened to the first and the last."""
    if not ranks:
        return "no rank in particular"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == world_size and world_size > 2:
        return f"all {world_size} ranks"
    parts = [part for run in group_runs(ranks) for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 3 else map(str, run))]
    return "ranks " + (", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0])


def by_ranks(texts: Mapping[int, str], world_size: int) -> str:
    """Return the text of each rank, once for ranks with the same text: 'rank 0 in barrier #1; ranks 1-3 in send (...)'."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(stated(tuple(of), text, world_size) for text, of in ranks.items())


_PLURAL = {"is": "are", "was": "were", "has": "have", "does": "do", "carries": "carry", "tries": "try"}


def stated(ranks: tuple[int, ...], text: str, world_size: int) -> str:
    """Return a statement about ranks. ``text`` begins with its verb in the singular: 'is behind', or with a preposition."""
    if len(ranks) > 1:
        verb, _, rest = text.partition(" ")
        is_verb = verb in _PLURAL or (verb.endswith("s") and verb.isalpha() and verb not in ("as", "this"))
        verb = _PLURAL.get(verb, verb.removesuffix("s")) if is_verb else verb
        text = f"{verb} {rest}".rstrip().replace(" its ", " their ")
    return f"{describe_ranks(ranks, world_size)} {with_name_of_other(text, ranks, world_size)}"


_THE_OTHERS = re.compile(r"\bthe others(?P<of>')?(?: (?P<verb>wait|enter|go|train|are|were|have|do|carry)\b)?")
_SINGULAR = {plural: verb for verb, plural in _PLURAL.items()} | {"go": "goes"}


def with_name_of_other(text: str, ranks: tuple[int, ...], world_size: int) -> str:
    """Return a text about one of two ranks with the other one's number in place of 'the others'."""
    if world_size != 2 or len(ranks) != 1:
        return text
    other = f"rank {1 - ranks[0]}"

    def named(match: re.Match[str]) -> str:
        verb = match["verb"]
        return other + ("'s" if match["of"] else "") + (f" {_SINGULAR.get(verb, f'{verb}s')}" if verb else "")

    return _THE_OTHERS.sub(named, text)


def group_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks as runs without gaps: [[0, 1, 2], [5]]."""
    runs = itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    return [[rank for _, rank in run] for _, run in runs]


_STATEMENTS = re.compile(r"; (?![^()]*\))")  # not in parentheses
_AT = re.compile(r" at [^ ;]+:\d+ in [^ ;,):]+")
_QUOTES = re.compile(r"\w+: ")  # the text of an exception, 'ValueError: no room'
_MOST_WORDS = 15
_ON_RANKS = re.compile(r": (?=(all \d+ )?ranks? )")


def split_reason(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the first statement of a reason, without the lines that its labels have, and the further statements.

    A first statement of more than 15 words is cut at a colon before a statement on ranks.
    """
    first, *rest = _STATEMENTS.split(text)
    first = first if _QUOTES.match(first) else _AT.sub("", first)
    colon = _ON_RANKS.search(first) if len(first.split()) > _MOST_WORDS else None
    if colon is not None:
        first, rest = first[: colon.start()], [first[colon.start() + 2 :], *rest]
    return first, tuple(rest)
