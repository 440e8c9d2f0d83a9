"""Verdicts to decision: what rows that fail and pass show of the factors that a failure needs, in the words of the seeds' tree."""

import itertools
import linecache
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.decision import Decision, choose_advice, count, nothing_wrong, sentence, surest, without_ranks
from pytest_nsa.diagnosis.verdict import Verdict, describe_ranks
from pytest_nsa.evidence.source import LOCATION
from tests_cpu.plan.controls import Class, Explanation, explain, has_control, separating, widest
from tests_cpu.plan.factors import BACKEND, LOOK, QUESTIONS, WHAT_CHANGES, Factor, factors, facts_by_name
from tests_cpu.plan.readiness import Verdicts, readiness, tells
from tests_cpu.plan.scenarios import CPU, GPU, ROOT, TABLE

CONTRADICTORY = 0.3
UNDECIDED = 0.5  # at most, where nothing separates several hypotheses
ALMOST = 0.8  # at most, where rows without a control contradict
NAMED = 3  # rows, or factors, that a text names
CHECKS = "tests_cpu/plan/health.py:"  # where rows assert what they alone assert
RAN_OUT = ("slow", "compiling")  # of time, while they made progress
STATES = CONFIRMED, NOT_TESTED, REFUTED, NOT_ASKED = "confirmed", "not tested", "refuted", ""
ANSWERS = {CONFIRMED: "yes", NOT_TESTED: "not tested", REFUTED: "no"}
# How far a row gets, by words of its place and of the line there.
STAGES = (
    ("construction", "in wrap_"), ("update", "in _optimize"), ("update", "in _update"), ("backward", "in backward"),
    ("forward", "in forward"), ("backward", ".backward()"), ("forward", "self.loss("),
)  # fmt: skip

OWN = ("is every failure the ranks' own, and not the model's?", "yes: do as its cause advises")
FOUND = (
    "has a check of checkpointing found the operation or the layer?",
    "yes: take the write out of the region", "yes: gradient checkpointing, of that layer",
)  # fmt: skip
TWICE = ("do equal rows end the same way?", "no: contradictory, repeat the run")
OTHER = ("does anything else that rows change matter?", "yes: what the row changes")
SAME = ("are the same parameters missing every time?", "yes: the module that owns them")
REST = ("what do all failing rows share?", "their cause and place: do as it advises", "both models: what they share")
TREE = (OWN, FOUND, TWICE, *((q.text, *dict.fromkeys(f.exit for f in q.factors)) for q in QUESTIONS), OTHER, SAME, REST)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Failing rows of one cause and place, and what separates them from the rows that pass.

    ``also`` are rows that end otherwise, and have the factors that these need; ``alone`` are rows that end alike, without these
    factors: every other row differs from them in several things, so they answer no question.
    """

    failed: Verdicts
    why: Explanation
    also: Verdicts
    alone: Verdicts
    is_own: bool

    @property
    def cause(self) -> str:
        """The cause of most rows."""
        return Counter(v.cause for v in self.failed.values()).most_common(1)[0][0]

    @property
    def where(self) -> str:
        """The place of most rows; '' if it is not known."""
        return Counter(v.where for v in self.failed.values()).most_common(1)[0][0]

    @property
    def at(self) -> str:
        """' at PLACE'."""
        return f" at {self.where}" if self.where else ""


class Run:
    """The rows of a run: which failed, passed, or show nothing, and the facts of every row of the plan."""

    def __init__(self, verdicts: Verdicts) -> None:
        self.verdicts = verdicts
        on_nccl = any(v.backend == "nccl" for v in verdicts.values())
        is_real = on_nccl or not facts_by_name(True).keys().isdisjoint(verdicts.keys() - facts_by_name(False).keys())
        self.facts = {}
        for name, facts in facts_by_name(is_real).items():
            ran = verdicts[name].backend if name in verdicts and facts["parallel.mode"] != "none" else facts[BACKEND]
            self.facts[name] = {**facts, BACKEND: ran or ("nccl" if on_nccl else "gloo")}
        self.factors = factors(is_real)
        known = {name: verdicts[name] for name in self.facts if name in verdicts and tells(verdicts[name])}
        self.ran_out = {name: v for name, v in known.items() if v.failed and v.cause in RAN_OUT}
        self.failed = {name: v for name, v in known.items() if v.failed and name not in self.ran_out}
        self.passed = [name for name, v in known.items() if v.outcome == "PASS"]
        skipped = {name for name, v in verdicts.items() if v.outcome == "SKIP"}
        size = GPU if is_real else CPU
        ordered = sorted(TABLE, key=lambda row: (row.steps > 3, row.phase, row.steps))
        self.phases = {size.find_name(row): row.phase for row in ordered if not row.fails_as}
        self.left = [name for name in self.phases if name not in {*self.failed, *self.passed, *skipped}]

    def explain(self, failing: Iterable[str]) -> Explanation:
        """Return what separates failing rows from those that pass."""
        return explain(tuple(failing), self.passed, self.facts, self.factors)

    def wide(self, classes: Iterable[Class]) -> list[Class]:
        """Return classes without the factors from which another one of the class follows."""
        return [widest(chosen, self.facts.values()) for chosen in classes]

    def find_next(self, why: Explanation) -> str:
        """Return the cheapest row that would separate hypotheses, and how it is run; '' without one."""
        known = [*self.failed, *self.passed]
        controlled = [name for name in self.left if has_control(name, known, self.facts)]
        name = separating(why, controlled, self.facts) or separating(why, self.left, self.facts)
        more = ", with more time" if name in self.ran_out else ""
        return f"run {name} (--phases {self.phases[name]} -k {name}){more}" if name else ""


def is_of_the_plan(verdicts: Verdicts) -> bool:
    """Return whether scenarios of the plan were run."""
    return any(name in facts_by_name(is_real) for name in verdicts for is_real in (False, True))


def find_faults(run: Run) -> list[Fault]:
    """Return the faults of a run, the one of most rows first."""
    groups: dict[tuple[str, str], dict[str, Verdict]] = {}
    for name, v in run.failed.items():  # a rank that is killed may be anywhere
        groups.setdefault((v.cause, "" if is_of_the_ranks(v) else v.where), {})[name] = v
    left = sorted(groups.items(), key=lambda group: -len(group[1]))
    faults: list[Fault] = []
    while left:
        ((cause, _), failed), *left = left
        why, is_own = run.explain(failed), is_of_the_ranks(next(iter(failed.values())))
        also: dict[str, Verdict] = {}
        alone: dict[str, Verdict] = {}
        # Rows of this cause at another place, where one explanation serves both.
        for group in [] if is_own else list(left):
            both = {**failed, **group[1]}
            if group[0][0] == cause and (not why.sets or why.covers([run.facts[name] for name in group[1]])):
                failed, why = both, run.explain(both)
                left.remove(group)
        if not (why.sets or why.twins or is_own):
            controlled = {n: v for n, v in failed.items() if has_control(n, [*run.passed, *run.failed], run.facts)}
            found = run.explain(controlled)
            if controlled and found.sets:
                failed, why, alone = controlled, found, {n: v for n, v in failed.items() if n not in controlled}
        for group in list(left) if why.sets and not is_own else []:
            if why.covers([run.facts[name] for name in group[1]]):
                also |= group[1]
                left.remove(group)
        faults.append(Fault(failed=failed, why=why, also=also, alone=alone, is_own=is_own))
    return sorted(faults, key=lambda f: (-len(f.failed) - len(f.also) - len(f.alone), f.is_own))


def decide(verdicts: Verdicts) -> Decision:
    """Return the decision over verdicts by scenario."""
    failed = {name: v for name, v in verdicts.items() if v.failed}
    if not failed:
        return replace(nothing_wrong(verdicts), readiness=readiness(verdicts))
    run = Run(verdicts)
    faults = find_faults(run)
    judged = {"hypotheses": _hypotheses(run, faults[0] if faults else None), "readiness": readiness(verdicts)}
    refused = without_ranks(verdicts)
    if refused is not None:
        return replace(refused, **judged)
    ways = [_find_way(run, fault) for fault in faults]
    path, actions = [step for way in ways[:1] for step in way.path], [way.action for way in ways[:1]]
    if run.ran_out:
        names = _some(run.ran_out, 8)
        path.insert(0, f"had every row time enough? no, {len(run.ran_out)} made progress until the end: {names}")
        actions.append(f"run again with more time, as they made progress until the end: {names}")
    for fault, way in zip(faults[1:], ways[1:], strict=True):
        ends = f"{_some(fault.failed)}: {fault.cause}{fault.at}"
        path.append(f"is there another fault? yes, {ends}: {way.action}")
        actions.append(f"another fault, {ends}: {way.action}")
    name, first = _telling(run, faults[0].failed) if faults else surest(failed)
    return Decision(
        sentence=sentence(verdicts, failed, name, first),
        action="; ".join(actions),
        path=tuple(path),
        confidence=min(first.confidence, ways[0].confidence) if ways else first.confidence,
        tree=TREE,
        taken=ways[0].exit if ways else "",
        factors=_table(run, faults),
        **judged,
    )


class Way(NamedTuple):
    """The way through the tree for one fault: its steps, the exit, what is to do, and how sure that is at most."""

    path: list[str]
    exit: str
    action: str
    confidence: float = 1.0


def _find_way(run: Run, fault: Fault) -> Way:
    """Return the way of a fault: by what a check found, by the factors that it needs, else by what its rows share."""
    (name, first), why = _telling(run, fault.failed), fault.why
    advice, step = choose_advice(fault.failed, name, first)
    if why.twins:
        pair = " and ".join(f"{n} ({run.verdicts[n].outcome})" for n in why.twins[0])
        action = "contradictory: repeat the run; equal rows fail and pass by turns, so nothing follows from what passes"
        more = f"; where it fails: {advice}" if fault.is_own else ""
        return Way([f"{TWICE[0]} no: {pair}"], TWICE[1], action + more, CONTRADICTORY)
    if fault.is_own:
        only = [c[0].name for c in run.wide(why.needed) if len(c) == 1 and c[0].action and why.pairs[c[0]]]
        action = advice + (f"; it needs {' and '.join(only)}" if only else "")
        return Way([f"{OWN[0]} yes: {fault.cause}; the tree ends here"], OWN[1], action)
    for row, exit_ in (("gc_inplace_writes", 1), ("gc_boundaries", 2), ("gc_reentrant_one_process", 2)):
        found = _found_by_check(fault.failed.get(row) or fault.also.get(row))
        if found:
            action = LOOK if exit_ > 1 else "take the write out of the checkpointed region"
            return Way([f"{FOUND[0]} yes: {row}: {found}"], FOUND[exit_], f"{action}: {found}")
    if fault.cause == "assertion":
        advice = f"mend what {name} found: {first.reason}" + (f" ({first.where})" if first.where else "")
    # Of the factors that it needs those that are decided and have an action come first; without any, those that it may need.
    needed = sorted(run.wide(why.needed), key=lambda c: (len(c) > 1, not c[0].action))
    chosen = needed[0] if needed else tuple(f for c in run.wide(why.possible) for f in c)
    path = _ask(run, fault, chosen)
    answer, action, has_ended = _missing_parameters(fault)
    if action and (has_ended or not any(f.action for f in chosen)):
        only = _with(run.wide(why.needed))
        confidence = 1.0 if has_ended else UNDECIDED
        return Way([*path, f"{SAME[0]} {answer}"], SAME[1], action + (f"; only {only}" if only else ""), confidence)
    if not chosen:
        return _by_what_is_shared(run, fault, [*path, step], advice)
    return _by_factors(run, fault, chosen, path, advice)


def _ask(run: Run, fault: Fault, chosen: Class) -> list[str]:
    """Return the questions with their answers, until one decides on ``chosen``."""
    path = []
    for question in QUESTIONS:
        state, rests = _best(run, fault, question.factors)
        path += [f"{question.text} {ANSWERS[state]}: {rests}"] if state else []
        if len(chosen) == 1 and chosen[0] in question.factors and chosen[0].action:
            return path
    if chosen and chosen[0].exit == OTHER[1]:
        state, rests = _best(run, fault, chosen)
        path.append(f"{OTHER[0]} {ANSWERS[state]}: {rests}")
    return path


def _by_factors(run: Run, fault: Fault, chosen: Class, path: list[str], advice: str) -> Way:
    why, stage, generic = fault.why, _stage(fault), _either(f for f in chosen if f.action == WHAT_CHANGES)
    words = {"stage": stage, "where": f" ({fault.where})" if fault.where else "", "name": generic}
    # What fails before it runs fails by nothing that it does.
    actions = [f.action.format(**words) if f.action and stage != "construction" else advice for f in chosen[:NAMED]]
    if fault.cause == "assertion" and all(f.action == WHAT_CHANGES for f in chosen):
        actions = [f"{advice}, with {generic}"]
    # What no pair shows to be needed, rows that differ in several things do.
    shown, unsure = [], [*run.wide(why.possible)] if why.needed else []
    for c in run.wide(why.needed):
        (shown if any(why.pairs[f] for f in c) else unsure).append(c)
    also_needed = _with(c for c in shown if c != chosen)
    action = " or ".join(dict.fromkeys(actions)) + (f", {also_needed}" if also_needed else "")
    then = run.find_next(why)
    if then:
        path.append(f"which row would show more? {then}")
        possible = next((c for c in why.needed if chosen[0] in c), tuple(f for c in why.possible for f in c))
        if len(possible) > 1 or not why.pairs[chosen[0]]:
            what = f"decide whether it is {_either(possible)}" if len(possible) > 1 else "confirm it"
            action += f"; {then} to {what}"
    if any(c != chosen for c in unsure):
        path.append(f"what may it need as well? {_either(f for c in unsure if c != chosen for f in c)}")
    if fault.also:
        path.append(f"do rows fail otherwise that have the same factors? yes: {_some(fault.also)}")
    if fault.alone:
        path.append(f"do rows fail without these factors? yes, but without a control: {_some(fault.alone)}")
    confidence = why.confidence(chosen[0]) if why.needed and len(chosen) == 1 else UNDECIDED
    return Way(path, chosen[0].exit, action, min(confidence, ALMOST) if fault.alone else confidence)


def _by_what_is_shared(run: Run, fault: Fault, path: list[str], advice: str) -> Way:
    """Return the way where no factor separates rows that fail from rows that pass."""
    facts, stage = [run.facts[name] for name in fault.failed], _stage(fault)
    answer = "no factor of the plan" if run.passed else "every row that ran fails"
    confidence = UNDECIDED if run.passed else 1.0
    if {f["model.attention"] for f in facts} == {"nsa", "dense"} and any(f["parallel.mode"] == "none" for f in facts):
        what = "the update" if stage == "update" else "what both models share (embedding, norms, MLP, head, loss)"
        action = f"look at {what}: plain attention fails too{fault.at}"
        return Way([*path, f"{REST[0]} {answer}; both models fail{fault.at}"], REST[2], action, confidence)
    at = f"; they fail in the {stage}{fault.at}" if stage != "code" else ""
    return Way([*path, f"{REST[0]} {answer}; {fault.cause}{fault.at}"], REST[1], f"{advice}{at}", confidence)


def _with(classes: Iterable[Class]) -> str:
    """Return 'with fused kernels and several ranks'; '' for no classes."""
    found = [_either(c) for c in classes]
    return f"with {' and '.join(found)}" if found else ""


def _best(run: Run, fault: Fault, chosen: Iterable[Factor]) -> tuple[str, str]:
    """Return the state of the factor of which most is known."""
    return min((_state(run, fault, factor) for factor in chosen), key=lambda found: STATES.index(found[0]))


def _state(run: Run, fault: Fault, factor: Factor) -> tuple[str, str]:
    """Return whether a fault needs a factor, and by which rows; where no failing row has it, the question does not arise."""
    lacking = [name for name in fault.failed if not factor.has(run.facts[name])]
    if len(lacking) == len(fault.failed):
        return NOT_ASKED, "no failing row has it"
    if lacking:
        return REFUTED, f"{_some(lacking)} failed without {factor.name}"
    spared = [name for name in run.passed if not factor.has(run.facts[name])]
    found = next((c for c in (*fault.why.needed, *fault.why.possible) if factor in c), ())
    if found in fault.why.needed and run.wide([found]) == [(factor,)] and fault.why.pairs[factor]:
        pairs = fault.why.pairs[factor]
        matched = f"{pairs[0][0]} fails, {pairs[0][1]}, equal in all else, passes ({count(len(pairs), 'matched pair')})"
        return CONFIRMED, f"{factor.name}: {matched}"
    if found:
        then = run.find_next(fault.why)
        return NOT_TESTED, f"{factor.name}: {_some(spared)} passed without{f'; {then}' if then else ''}"
    has = [name for name in run.passed if factor.has(run.facts[name])]
    if has and not fault.why.twins:
        return REFUTED, f"{_some(has)} passed with {factor.name}"
    left = next((name for name in run.left if not factor.has(run.facts[name])), "")
    return NOT_TESTED, f"{factor.name}: {f'run {left} (--phases {run.phases[left]})' if left else 'no row lacks it'}"


def _missing_parameters(fault: Fault) -> tuple[str, str, bool]:
    """Return whether the same parameters are missing in every row, what is then to do, and whether backward has ended."""
    failed = [*fault.failed.values(), *fault.also.values()]
    ended = [v for v in failed if v.cause == "unused_parameters" and v.parameters_missing]
    lists = [v.parameters_missing for v in ended or failed if v.parameters_missing]
    common = sorted(set.intersection(*map(set, lists))) if len(lists) > 1 else []
    answer = f"yes: {', '.join(common[:5])}"
    if common and ended:
        ranks = {(v.ranks, v.world_size) for v in ended}
        (blamed, n) = next(iter(ranks))
        only = f", on {describe_ranks(blamed, n)} alone," if len(ranks) == 1 and len(blamed) < n else ""
        action = f"look in the module that owns them ({_owner(common)}){only} for what keeps their gradient from them"
        return answer, f"{action}: a detached tensor, an operation in place", True
    if not common or any(set(found) != set(common) for found in lists):
        return answer, "", False
    # A stall's list has what was still to come. The last of the model is the first that backward comes to.
    owner = lists[0][-1].rpartition(".")[0]
    return answer, f"look for in-place operations in the module that owns them ({owner})", False


def _owner(names: list[str]) -> str:
    """Return the module that owns parameters: the innermost that has all of them, or the first one's where that is the model."""
    owners = [name.rpartition(".")[0].split(".") for name in names]
    shared = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))]
    return ".".join(shared if len(shared) > 1 else owners[0])


def is_of_the_ranks(verdict: Verdict) -> bool:
    """Return whether a failure is an explanation by itself, with which the model has nothing to do.

    An ordinary failure that all ranks share, such as an exception in backward, is the model's.
    """
    is_shared = verdict.cause == "assertion" and len(verdict.ranks) >= verdict.world_size
    return verdict.cause in CAUSES and CAUSES[verdict.cause].of_the_rank and not is_shared


def _found_by_check(verdict: Verdict | None) -> str:
    """Return what a row's own check found; '' where it did not run, found nothing, or failed in the backward of all others."""
    if verdict is None or verdict.cause != "assertion" or CHECKS not in verdict.where:
        return ""
    asserted, _, text = verdict.reason.partition(": ")
    return text if asserted == "AssertionError" else ""


def _telling(run: Run, failed: Verdicts) -> tuple[str, Verdict]:
    """Return the most specific row and its verdict: the one with the fewest factors; among equals, the surest."""
    named = [factor for question in QUESTIONS for factor in question.factors]

    def rank(row: tuple[str, Verdict]) -> tuple[bool, int, float]:
        has = sum(factor.has(run.facts[row[0]]) for factor in named)
        return not _found_by_check(row[1]), has, -row[1].confidence

    return min(failed.items(), key=rank)


def _stage(fault: Fault) -> str:
    """Return how far the rows of a fault get: which of construction, forward, backward and update fails; 'code' if unknown."""
    if fault.cause == "nan_loss":
        return "forward"
    places = dict.fromkeys(place for v in fault.failed.values() for place in (v.where, v.called_from))
    found = [match for place in places if (match := LOCATION.match(place))]
    lines = [linecache.getline(str(ROOT / match["file"]), int(match["line"])) for match in found]
    is_partial = any(v.parameters_missing for v in fault.failed.values())
    texts = " ".join([*places, *lines])
    return next((stage for stage, word in STAGES if word in texts), "backward" if is_partial else "code")


def _hypotheses(run: Run, fault: Fault | None) -> tuple[tuple[str, str, str], ...]:
    """Return (hypothesis, state, what it rests on) of each, for the larger fault."""
    rows = []
    for question in QUESTIONS:
        state, rests = _best(run, fault, question.factors) if fault else (NOT_TESTED, "no row shows anything")
        rows.append((question.hypothesis, state or REFUTED, rests))
    found = [name for name, v in run.failed.items() if v.cause == "unused_parameters"]
    unused = (CONFIRMED, _some(found)) if found else (REFUTED, "no row names one")
    return (*rows, ("a step leaves parameters unused", *unused), (READY_ORDER, *_ready_order(run.verdicts)))


READY_ORDER = "gradients become ready in another order on some rank"


def _ready_order(verdicts: Verdicts) -> tuple[str, str]:
    """By the order in which the trace of gradients saw each rank's become ready; one bucket after the other waits for that."""
    orders = {name: v.figures.get("ready_orders", 0) for name, v in verdicts.items()}
    several, one = [name for name, n in orders.items() if n > 1], [name for name, n in orders.items() if n == 1]
    wrong = [name for name in several if verdicts[name].failed]
    if wrong:
        return CONFIRMED, f"the ranks' gradients came in {orders[wrong[0]]:.0f} orders in {_some(wrong)}"
    if several:
        return REFUTED, f"they come in another order in {_some(several)}, which passes all the same"
    return (
        (REFUTED, f"they come in one order in {_some(one)}")
        if one
        else (NOT_TESTED, "no row of several ranks shows it")
    )


def _table(run: Run, faults: Sequence[Fault]) -> tuple[tuple[str, ...], ...]:
    """Return a row per scenario: whether it has the factors that the larger fault needs, what it sets, and its matched pairs."""
    why = faults[0].why if faults else run.explain(())
    needed = [c[0] for c in run.wide(why.needed) if why.pairs[c[0]]][:NAMED]
    controls = {(factor, good): bad for factor in needed for bad, good in reversed(why.pairs[factor])}
    pairs: dict[str, list[str]] = {}
    for number, ((_, good), bad) in enumerate(controls.items(), 1):
        for name in (good, bad):
            pairs.setdefault(name, []).append(str(number))
    plain: Mapping[str, object] = next(iter(run.facts.values()))
    usual = {key: Counter(str(f[key]) for f in run.facts.values()).most_common(1)[0][0] for key in plain}
    rows = [("scenario", *(factor.name for factor in needed), "sets", "matched pair")]
    for name in (name for name in run.verdicts if name in run.facts):
        sets = [
            f"{key.rpartition('.')[2]} {value}" for key, value in run.facts[name].items() if str(value) != usual[key]
        ]
        has = [factor.name if factor.has(run.facts[name]) else "" for factor in needed]
        marks = f"pair {', '.join(pairs[name][:NAMED])}" if name in pairs else ""
        rows.append((name, *has, ", ".join(sets), marks))
    return tuple(rows)


def _either(chosen: Iterable[Factor]) -> str:
    names = list(dict.fromkeys(f.name for f in chosen))
    more = f" or {len(names) - NAMED} more" if len(names) > NAMED else ""
    return " or ".join(names[:NAMED]) + more


def _some(names: Iterable[str], most: int = NAMED) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
