"""What replicas loaded and set is reported as the reason only where it can be one."""

from typing import Any

import pytest

from pytest_nsa.diagnosis.rules.training_states import with_origin
from pytest_nsa.diagnosis.verdict import Finding

FOUND = Finding(cause="silent_divergence", ranks=(3,), where="train.py:9 in step", reason="they differ", confidence=0.9)
MODEL, OPTIMIZER = ["model", "train.py:3 in load", 2.0, ""], ["optimizer", "train.py:4 in load", 1.0, ""]
SETTINGS = {"settings": [{"lr": 0.1}]}


def told(*ranks: dict[str, Any], equal_first: bool = False) -> Finding:
    """Return the finding on ranks whose one record that differs has these; with a record before in which they were equal."""
    streams = {rank: ([dict(of)] if equal_first else []) + [dict(of)] for rank, of in enumerate(ranks)}
    last = {rank: records[-1] for rank, records in streams.items()}
    equal = {rank: records[0] for rank, records in streams.items()} if equal_first else {}
    return with_origin(FOUND, len(ranks), streams, last, equal)


@pytest.mark.parametrize(
    ("ranks", "says", "where"),
    [
        (
            [{"loads": [OPTIMIZER]}] * 3 + [{}],
            "rank 3 did not load the optimizer that ranks 0, 1 and 2 loaded",
            OPTIMIZER[1],
        ),
        (
            [{"loads": [[*OPTIMIZER[:3], ""]]}] * 3 + [{"loads": [[*OPTIMIZER[:3], "KeyError: 2"]]}],
            "(KeyError: 2)",
            OPTIMIZER[1],
        ),
        (
            [{"loads": [MODEL]}] * 3 + [{"loads": [["model", MODEL[1], 3.0, ""]]}],
            "is not the same on all ranks",
            MODEL[1],
        ),
        (
            [SETTINGS] * 3 + [{"settings": [{"lr": 0.05}], "set_at": "train.py:7 in run"}],
            "lr differs",
            "train.py:7 in run",
        ),
        ([SETTINGS] * 3 + [{"settings": [{"lr": 0.05}]}], "lr differs", FOUND.where),
        ([{"added": ["head.weight"]}] * 4, "DDP does not track head.weight", FOUND.where),
        (
            [{"added": [["head.weight", "train.py:5 in swap"]]}] * 4,
            "after the model was wrapped, at train.py:5",
            "train.py:5 in swap",
        ),
    ],
)
def test_what_differs_is_told_with_its_line(ranks: list[dict[str, Any]], says: str, where: str) -> None:
    finding = told(*ranks)
    assert says in finding.reason
    assert finding.where == where


@pytest.mark.parametrize(
    "ranks",
    [
        [{}] * 4,
        [{"loads": [MODEL, OPTIMIZER], **SETTINGS}] * 4,
        [{"loads": [MODEL]}] + [{}] * 3,  # broadcast from there
        [{"loads": [["model", MODEL[1], 2.0 + 1e-13, ""]]}] + [{"loads": [MODEL]}] * 3,
    ],
)
def test_what_is_alike_or_broadcast_is_not_told(ranks: list[dict[str, Any]]) -> None:
    assert told(*ranks) == FOUND


def test_what_was_loaded_before_replicas_were_equal_is_not_why() -> None:
    assert told(*[{"loads": [OPTIMIZER]}] * 3, {}, equal_first=True) == FOUND
