"""Fit the weights of the terms by which the diagnosis explains that ranks are in different calls.

    python benchmarks/fit.py            writes pytest_nsa/diagnosis/explain/weights.json

The model is a conditional logit: of the edits that would explain a fault, the right one has the highest score. It is fitted to the
recorded faults of tests_cpu/faults, and to recorded generated programs (`generated.py --record`), with a quadratic penalty.
`ablation.py` fits it again without each part of the recorded faults, and scores it on that part.
"""

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.explain import choose
from pytest_nsa.diagnosis.explain.edits import Edit, candidates
from pytest_nsa.diagnosis.facts import rings
from pytest_nsa.diagnosis.rules.absence import find_left_ranks
from pytest_nsa.diagnosis.rules.calls import held_in_different_calls
from pytest_nsa.diagnosis.rules.keys import held_for_keys
from pytest_nsa.diagnosis.rules.messages import held_in_messages
from pytest_nsa.evidence.collectives import first_departure
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.values import Evidence
from tests_cpu.faults.recorded import GENERATED, extract, unpack
from tests_cpu.faults.rows import faults, list_archives

TABLE = Path(choose.__file__).with_name("weights.json")
PENALTY = 5e-4  # of a squared weight, per fault
AS_MANY = 60  # written faults as an archive of generated programs counts for
LEAST = 0.05  # of a weight that is kept
# What a recorded cause may be as an edit: some name why a call was skipped, or made otherwise.
CAUSES = {
    Edit.SKIP: ("skipped_collective", "data_dependent_branch", "hook_deadlock"),
    Edit.EXTRA: ("extra_collective", "hook_deadlock"),
    Edit.MISMATCH: ("collective_mismatch", "hook_deadlock"),
    Edit.ORDER: ("group_order_deadlock",),
    Edit.UNANSWERED: ("p2p_unmatched",),
    Edit.UNASKED: ("p2p_unmatched",),
    Edit.MISDIRECTED: ("p2p_unmatched",),
    Edit.UNSET: ("missing_collective",),
    Edit.NEVER_SET: ("missing_collective", "io_stuck"),
}
# By rule, what ranks are in that it explains.
ENTERED = {
    "calls.departed": lambda evidence: first_departure(rings(evidence)),
    "calls.waiting_in_different_calls": held_in_different_calls,
    "messages.unpaired": held_in_messages,
    "absence.left_alone": find_left_ranks,
    "keys.unset": held_for_keys,
}
Weights = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """A fault: the kind of edit and the terms' values of each candidate, which of them are right, and, of a written fault, its file
    and test.
    """

    fault: tuple[str, str] | None
    kinds: tuple[str, ...]
    values: tuple[Mapping[str, float], ...]
    right: frozenset[int]
    weight: float


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded program with a fault: its archive and test (None where it was generated), and the right answer.

    ``archive`` is the generator's, '' of a written fault.
    """

    fault: tuple[str, str] | None
    archive: str
    evidence: Evidence
    causes: Collection[str]
    ranks: tuple[int, ...]


def programs(folder: Path) -> list[Program]:
    """Return all recorded programs, which are unpacked into ``folder``."""
    found = []
    for archive in list_archives():
        expected = faults(archive)
        for name, path in unpack(archive, folder / archive).items():
            if name in expected:  # not one that was recorded again
                of = expected[name]
                found.append(Program((archive, name), "", load(path), (of.cause,), tuple(sorted(of.ranks))))
    for archive in sorted(GENERATED.glob("*.tar.xz")):
        into = folder / archive.name
        extract(archive, into)
        labels = json.loads((into / "labels.json").read_text(encoding="utf-8"))
        for name, label in labels.items():
            found.append(Program(None, archive.name, load(into / name), label["causes"], tuple(sorted(label["ranks"]))))
    return found


def row_of(program: Program) -> Row | None:
    """Return the row of a fault that is explained by an edit; None of any other."""
    with patch.object(choose, "weights", dict):  # which edit is chosen changes nothing in whether one is
        rule = diagnose(program.evidence).rule
    entered = ENTERED[rule](program.evidence) if rule in ENTERED else None
    if not entered:
        return None
    found, causes = candidates(program.evidence, entered), set(program.causes)
    right = {i for i, c in enumerate(found) if causes & set(CAUSES[c.edit]) and c.ranks == program.ranks}
    if not right:
        return None
    return Row(program.fault, tuple(c.kind for c in found), tuple(c.values for c in found), frozenset(right), 1.0)


def rows(of: Sequence[Program]) -> list[Row]:
    """Return the rows of recorded programs. All generated ones of an archive together weigh no more than `AS_MANY`."""
    made = [(program.archive, row) for program in of if (row := row_of(program)) is not None]
    numbers = Counter(archive for archive, _ in made)
    return [replace(row, weight=min(1.0, AS_MANY / numbers[archive])) if archive else row for archive, row in made]


def fitted(of: Sequence[Row]) -> Weights:
    """Return the weights, by kind of edit and term, under which the right edits of the rows are the most likely."""
    names = sorted(
        {(kind, name) for row in of for kind, values in zip(row.kinds, row.values, strict=True) for name in values}
    )
    at = {name: i for i, name in enumerate(names)}
    # Each value that is not 0: of the candidate in `place`, one of `most` for each row, the term `which`.
    most = max(len(row.kinds) for row in of)
    entries = [
        (i * most + j, at[kind, name], value)
        for i, row in enumerate(of)
        for j, (kind, values) in enumerate(zip(row.kinds, row.values, strict=True))
        for name, value in values.items()
    ]
    place, which = (torch.tensor([entry[k] for entry in entries]) for k in (0, 1))
    held = torch.tensor([value for *_, value in entries], dtype=torch.float64)
    absent = torch.full((len(of), most), -1e9, dtype=torch.float64)
    wrong = absent.clone()
    for i, row in enumerate(of):
        absent[i, : len(row.kinds)] = 0
        wrong[i, [*row.right]] = 0
    counts = torch.tensor([row.weight for row in of], dtype=torch.float64)
    weights = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = torch.zeros(len(of) * most, dtype=torch.float64).index_add(0, place, held * weights[which])
        scores = scores.view(len(of), most)
        missed = torch.logsumexp(scores + absent, 1) - torch.logsumexp(scores + wrong, 1)
        total = (counts * missed).sum() + PENALTY * counts.sum() / 2 * weights.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    table: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (kind, name), weight in zip(names, weights.tolist(), strict=True):
        if abs(weight) >= LEAST:
            table[kind][name] = round(weight, 2)
    return dict(table)


def main() -> None:
    """Fit the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to write (default: the package's)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = rows(programs(Path(folder)))
    weights = fitted(found)
    text = json.dumps({"fitted_to": len(found), "weights": weights}, indent=1, sort_keys=True)
    arguments.table.write_text(text + "\n", encoding="utf-8")
    print(f"{len(found)} faults, {sum(map(len, weights.values()))} weights: {arguments.table}")


if __name__ == "__main__":
    main()
