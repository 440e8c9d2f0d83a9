"""Evidence to verdict: the rules run in a fixed order, and the first that returns a finding decides."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.diagnosis.facts import (
    all_facts,
    is_of_the_machine,
    last_seen,
    memory_fact,
    parameters_missing,
    signal_text,
    xid_facts,
)
from pytest_nsa.diagnosis.labels import make_labels
from pytest_nsa.diagnosis.rules import (
    absence,
    autograd,
    calls,
    consequences,
    exits,
    groups,
    keys,
    messages,
    numbers,
    payloads,
    speed,
    stalls,
    unreduced,
    unwinding,
    wrapped,
)
from pytest_nsa.diagnosis.verdict import (
    NO_RANK,
    RULE_FAILED,
    Fact,
    Finding,
    Label,
    Outcome,
    Verdict,
    split_reason,
    with_name_of_other,
)
from pytest_nsa.evidence.values import Evidence

Rule = Callable[[Evidence], Finding | None]


def refused(evidence: Evidence) -> Finding | None:
    """Find that no rank was started."""
    if not evidence.refused:
        return None
    return Finding(
        cause="unknown", ranks=(), reason=f"the ranks could not be started: {evidence.refused}", confidence=1.0,
        advice="fix what kept the ranks from starting, and run again: nothing is known about the test",
    )  # fmt: skip


def unknown(evidence: Evidence, failures: tuple[Fact, ...] = ()) -> Finding:
    """Return the finding for evidence that no rule explains: each rank's location, with all facts."""
    where = "; ".join(f"rank {r.rank} at {place}" for r in evidence.ranks if not r.passed and (place := last_seen(r)))
    note = (
        "no rule fits" if evidence.was_stalled else "the process that ran the ranks was killed while they made progress"
    )
    return Finding(
        cause="unknown", ranks=tuple(r.rank for r in evidence.ranks if not r.passed),
        reason=f"{note}; {where or 'all the evidence is in the folder'}", confidence=0.0,
        facts=(*all_facts(evidence.ranks), *failures), rule="engine.unknown",
    )  # fmt: skip


# In order: torch's own error messages, the recorded collectives, the first exception or death, what each rank is blocked in.
RULES: tuple[Rule, ...] = (
    refused,
    absence.left_by_choice,
    wrapped.incompatible,
    payloads.models_differ,
    autograd.ready_twice,
    autograd.static_graph_changed,  # before the next: its message contains both
    autograd.unused_parameters,
    autograd.never_arrived,  # DDP's reductions of such a step fail in many ways, all of them consequences
    groups.numbers_differ,
    calls.departed,
    groups.groups_differ,
    messages.unpaired,
    payloads.splits_differ,
    calls.waiting_in_different_calls,
    messages.lost_messages,
    exits.unusable,
    exits.init_timeout,
    numbers.nan_loss,
    wrapped.was_ordered_otherwise,
    numbers.differed_earlier,
    consequences.raised_after_a_skip,
    exits.rank_raised,
    payloads.aborted_in_different_calls,
    payloads.aborted,
    payloads.received_another_size,
    stalls.aborted,
    exits.rank_died,
    exits.rank_gone,
    exits.rank_exited,
    exits.rank_replaced,
    absence.left_alone,
    speed.graph_explosion,
    speed.straggler,
    speed.slow,
    keys.unset,
    stalls.late,
    stalls.blocked,
    stalls.in_transit,
    absence.not_entered,
    exits.gave_up,
    exits.only_victims,
)


# For ranks that stall while the test runs, in the same order: what is announced is the later verdict.
SUSPICIONS: tuple[Rule, ...] = (
    groups.numbers_differ, calls.departed, groups.groups_differ, messages.unpaired, calls.waiting_in_different_calls,
    messages.lost_messages, exits.rank_gone, exits.rank_replaced, absence.left_alone, speed.graph_explosion, speed.straggler,
    keys.unset, stalls.blocked, stalls.in_transit, absence.not_entered,
)  # fmt: skip

# For ranks that all passed: errors that no rank raises.
OF_THE_PASSED: tuple[Rule, ...] = (
    payloads.splits_differ,
    payloads.wrong_numbers,
    wrapped.ordered_otherwise,
    numbers.silent_divergence,
    unreduced.unreduced_replicas,
    numbers.trained_away,
)


# Modules of rules on waits, which may be the consequence of an exception that a rank still handles.
_OF_STALLS = ("calls", "groups", "messages", "absence", "consequences", "keys", "stalls", "speed", "autograd")


def first_finding(rules: Sequence[Rule], evidence: Evidence) -> tuple[Finding | None, tuple[Fact, ...]]:
    """Return the first rule's finding, and a fact for each rule that failed before it.

    A finding that follows from a rank's own exception is replaced by one on that exception (`unwinding`). A rule that
    raises, or that names a cause outside the registry, is skipped: a failure of the diagnosis must never hide the
    test's.
    """
    failures: list[Fact] = []
    for rule in rules:
        name = find_name(rule)
        try:
            finding = rule(evidence)
            finding = replace(finding, rule=name) if finding is not None else None
            if finding is not None and name.partition(".")[0] in _OF_STALLS:
                finding = _with_name_of_other(evidence, finding)
                finding = unwinding.raised_in_a_thread(evidence, unwinding.in_cleanup(evidence, finding))
        except Exception as error:  # rules read evidence of arbitrary programs: any exception becomes a fact
            failures.append(_failure(name, f"{type(error).__name__}: {error}", error.__traceback__))
            continue
        if finding is None:
            continue
        if finding.cause not in CAUSES:
            failures.append(_failure(name, f"{finding.cause!r} is not a cause of the registry"))
            continue
        return replace(finding, facts=(*finding.facts, *failures)), tuple(failures)
    return None, tuple(failures)


def _with_name_of_other(evidence: Evidence, finding: Finding) -> Finding:
    """Return a finding on waits with the number of the other one of two ranks. Other findings quote the texts of exceptions."""
    n = evidence.job.world_size
    reason, advice = (with_name_of_other(text, finding.ranks, n) for text in (finding.reason, finding.advice))
    return replace(finding, reason=reason, advice=advice)


def find_name(rule: Rule) -> str:
    """Return a rule's name as the registry has it, 'calls.departed'."""
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


def _failure(rule: str, error: str, traceback: TracebackType | None = None) -> Fact:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    at = ""
    if traceback is not None:
        at = f" ({Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno})"
    return Fact(rank=NO_RANK, kind=RULE_FAILED, file="", text=f"rule {rule} failed: {error}{at}")


def diagnose(evidence: Evidence, more: Sequence[Rule] = ()) -> Verdict:
    """Return the verdict on a test's evidence. ``more`` are a repository's own rules, which run first."""
    ranks, job = evidence.ranks, evidence.job
    common: dict[str, Any] = {
        "scenario": job.scenario, "reads_as": job.reads_as, "nodeid": job.nodeid,
        "duration_s": round(evidence.duration_s, 3),
        "stalled_s": round(evidence.stalled_s, 3), "world_size": job.world_size,
        "backend": job.backend, "parallel": evidence.parallel, "parameters_missing": parameters_missing(evidence),
    }  # fmt: skip
    if evidence.stop == "interrupted":
        return _interrupted_verdict(evidence, common)
    if all(r.finished and r.passed for r in ranks):
        wrong, failures = first_finding(OF_THE_PASSED, evidence)
        if wrong is not None:
            return _from(wrong, job.root, outcome="FAIL", **common)
        return replace(_passed_verdict(evidence, common), evidence=failures)
    found, failures = first_finding((refused, *more, *RULES), evidence)
    finding = found or unknown(evidence, failures)
    finding = replace(finding, facts=(*finding.facts, *evidence.external))
    if evidence.lost:
        until_then = "" if finding.cause == "unknown" else f"; until then {finding.reason}"
        finding = replace(finding, reason=f"the ranks were lost: {evidence.lost}{until_then}")
    fallen = [r for r in ranks if r.fatal_signal and r.rank not in finding.ranks]
    if fallen:
        ended = ", ".join(f"{signal_text(r.signal)} ended rank {r.rank}" for r in fallen)
        finding = replace(finding, reason=f"{finding.reason}; a consequence: {ended}")
    culprits = [r for r in ranks if r.rank in finding.ranks]
    kept = next(((r.rank, *r.kept_errors[-1]) for r in culprits if r.kept_errors), None)
    if kept is not None:
        finding = replace(finding, reason=f"{finding.reason}; rank {kept[0]} had handled {kept[2]} (at {kept[3]})")
    machines = tuple(f"rank {r.rank} = {r.machine}" for r in culprits if r.machine)
    common["parameters_missing"] = parameters_missing(evidence, finding.ranks)
    outcome = _outcome(evidence, finding)
    held = memory_fact(evidence) if outcome == "HANG" else None
    finding = replace(finding, facts=(*finding.facts, *xid_facts(evidence), *([held] if held else [])))
    caller = evidence.sources.with_path(finding.called_from or find_caller(evidence, finding.where))
    caller = caller.replace(job.root.rstrip("/") + "/", "") if job.root else ""
    verdict = _from(finding, job.root, outcome=outcome, machines=machines, called_from=caller, **common)
    labels = _relative_labels(make_labels(evidence, finding), job.root)
    verdict = replace(verdict, labels=labels, because=tuple(s for s in verdict.because if not _IN_A_CALL.fullmatch(s)))
    return replace(verdict, retry="elsewhere") if is_of_the_machine(evidence) else verdict


def _relative_labels(labels: Sequence[Label], root: str) -> tuple[Label, ...]:
    prefix = root.rstrip("/") + "/"
    return tuple(replace(label, file=label.file.removeprefix(prefix)) if root else label for label in labels)


def find_caller(evidence: Evidence, where: str) -> str:
    """Return the user's line that called the function of ``where``; '' where that is the test itself, or unknown."""
    for rank in evidence.ranks:
        frames = [f for f in rank.stack.frames if f.is_user] if rank.stack is not None else []
        for inner, outer in itertools.pairwise(frames):
            if inner.describe() == where:
                return outer.describe()
    for rank in evidence.ranks:  # the stack of a rank that has ended is gone
        for call in reversed(rank.collectives):
            if call.site == where and len(call.way) > 1:
                return call.way[1]
    return ""


def suspect(evidence: Evidence) -> Finding | None:
    """Return the verdict on ranks that stall while the test runs; None where no rule fits."""
    found, _ = first_finding(SUSPICIONS, evidence)
    return None if found is None else _relative(found, evidence.job.root)


def _from(finding: Finding, root: str, **fields: Any) -> Verdict:
    """Return the verdict for a finding, with paths below ``root`` made relative; ``fields`` are what no rule sets."""
    finding = _relative(finding, root)
    reason, because = split_reason(finding.reason)
    return Verdict(
        cause=finding.cause, ranks=finding.ranks, where=finding.where, module=finding.module, evidence=finding.facts,
        certain=finding.certain, reason=reason, because=because, confidence=finding.confidence,
        advice=finding.advice or CAUSES[finding.cause].advice, retry=CAUSES[finding.cause].retry, rule=finding.rule,
        terms=finding.terms, **fields,
    )  # fmt: skip


# The labels have these statements, 'rank 1 waits in barrier #3 at train.py:3 in step'.
_IN_A_CALL = re.compile(
    r"(all \d+ ranks|ranks? [\d, and-]+) (waits? )?in \w+( #\d+)?( \([^)]*\))?( at \S+:\d+ in \S+)?( by \S+)?( in step \d+)?"
)


def _relative(finding: Finding, root: str) -> Finding:
    """Return the finding with paths relative to the tests' root, so that a verdict reads the same on every machine."""
    if not root:
        return finding
    prefix = root.rstrip("/") + "/"
    facts = tuple(replace(fact, text=fact.text.replace(prefix, "")) for fact in finding.facts)
    return replace(
        finding,
        where=finding.where.replace(prefix, ""),
        reason=finding.reason.replace(prefix, ""),
        advice=finding.advice.replace(prefix, ""),
        facts=facts,
    )


def _interrupted_verdict(evidence: Evidence, common: dict[str, Any]) -> Verdict:
    """Report the stall up to the interrupt, as far as it is known: Ctrl-C is what users press first on a hang."""
    found, by = None, evidence.stopped_by or "the user"
    if not evidence.moved_at_stop:
        found, _ = first_finding(RULES, replace(evidence, stop="deadline"))
    if found is None:
        return Verdict(
            outcome="INTERRUPTED", reason=f"interrupted by {by}", advice="run it again", evidence=all_facts(evidence.ranks),
            **common,
        )  # fmt: skip
    found = replace(found, reason=f"interrupted by {by}; until then {found.reason}")
    return _from(found, evidence.job.root, outcome="INTERRUPTED", **common)


def _passed_verdict(evidence: Evidence, common: dict[str, Any]) -> Verdict:
    ranks = evidence.ranks
    skipped = tuple(r.rank for r in ranks if r.skipped is not None)
    if not skipped:
        return Verdict(outcome="PASS", **common)
    reason = next(r.skipped for r in ranks if r.skipped is not None) or "skipped"
    if len(skipped) == len(ranks):
        return Verdict(outcome="SKIP", reason=reason, **common)
    return Verdict(
        outcome="FAIL", cause="data_dependent_branch", rule="engine.skipped_by_some", ranks=skipped, certain=True, confidence=0.95,
        where=str(evidence.ranks[skipped[0]].left.get("where", "")),
        reason=f"skipped on some ranks only ({', '.join(map(str, skipped))}): {reason}",
        advice="decide this from what all ranks know, so that all of them leave the test or none", **common,
    )  # fmt: skip


def _outcome(evidence: Evidence, finding: Finding) -> Outcome:
    cause = CAUSES[finding.cause]
    if cause.outcome:  # regardless of why the others were stopped
        return cause.outcome
    if any(r.fatal_signal and (not evidence.stop or r.exit_time < evidence.stop_time) for r in evidence.ranks):
        return "CRASH"  # whatever the others did until they were stopped, which depends on the machine's load
    if evidence.stop in ("departed", "left_alone", "certain", "deadline", "hang_after", "start"):
        return "HANG"
    return "HANG" if evidence.stop == "host_died" and evidence.stalled_s else "FAIL"
