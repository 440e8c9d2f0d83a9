"""A first divergence as lines of text: the statement, what each side did there with which values, and why."""

from collections.abc import Mapping, Sequence

from pytest_nsa.diagnosis.verdict import Verdict, describe_ranks
from pytest_nsa.flow.first import FirstDivergence
from pytest_nsa.flow.reasons import Step, shorten
from pytest_nsa.report.markup import Markup, tag

MOST_STEPS = 4


def read_divergence(verdict: Verdict) -> FirstDivergence | None:
    """Return the first divergence that a verdict holds; None without one, or for one that cannot be read."""
    try:
        return FirstDivergence.from_json(verdict.first_divergence) if verdict.first_divergence else None
    except (LookupError, TypeError, ValueError, AttributeError):  # of a file that any program may have written
        return None


def describe_causes(verdict: Verdict) -> list[str]:
    """Return the lines that the terminal shows below the frame: where each value was set; [] without a divergence."""
    found = read_divergence(verdict)
    if found is None:
        return []
    out = [f"  diverged in {found.within}"] if found.within else []
    for step in [step for step in found.because if step.where][:MOST_STEPS]:
        by_right = f" (by {step.by_right})" if step.by_right else ""
        at = step.where.partition(" in ")[0]
        out.append(f"  because  {step.name} = {_list_values(step)} {step.verb} at {at}: {step.statement}{by_right}")
    return out


def _list_values(step: Step) -> str:
    return " or ".join(map(shorten, step.values))


def divergence_table(verdict: Verdict) -> Markup | None:
    """Return the statement at which the ranks parted, with a column for each side, and what set the values; None without one."""
    found = read_divergence(verdict)
    if found is None or not (found.because or len(found.values) > 1):
        return None  # the labels have all of it
    # A column for each side: its head, what it did, and its values.
    sides = [
        (describe_ranks(ranks, verdict.world_size), outcome, {name: _value(of, ranks) for name, of in found.values.items()})
        for outcome, ranks in found.outcomes.items()
    ]  # fmt: skip
    if found.outcome_before:
        shown = {name: shorten(text) for name, text in found.values_before.items()}
        sides.append(("in its round before", found.outcome_before, shown))
    head = tag("tr", tag("td"), *(tag("th", who, scope="col") for who, _, _ in sides))
    rows = [tag("tr", tag("th", "did", scope="row"), *(tag("td", outcome) for _, outcome, _ in sides))]
    for name in found.values:
        cells = (tag("td", tag("code", of.get(name, ""))) for _, _, of in sides)
        rows.append(tag("tr", tag("th", tag("code", name), scope="row"), *cells))
    steps = [
        tag("li", tag("code", f"{step.name} = {_list_values(step)}"), f" {step.verb} at ", tag("code", step.where), ": ",
            tag("code", step.statement))
        for step in found.because if step.where
    ]  # fmt: skip
    return tag(
        "figure",
        tag("figcaption", "The ranks part at ", tag("code", found.where)),
        tag("p", "in ", tag("code", found.within)) if found.within else None,
        tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="sides"), class_="scroll"),
        tag("ol", *steps) if steps else None,
        class_="excerpt diverged",
    )


def _value(of: Mapping[int, str], ranks: Sequence[int]) -> str:
    texts = list(dict.fromkeys(shorten(of[rank]) for rank in ranks if rank in of))
    return " or ".join(texts[:3])
