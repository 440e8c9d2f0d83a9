"""What replicas loaded is reported as the reason only where it can be one; the recorded faults show the rest of the rule."""

from typing import Any

import pytest

from pytest_nsa.diagnosis.rules.training_states import with_origin
from pytest_nsa.diagnosis.verdict import Finding

FOUND = Finding(cause="silent_divergence", ranks=(3,), where="train.py:9 in step", reason="they differ", confidence=0.9)
OPTIMIZER = ["optimizer", "train.py:4 in load", 1.0, ""]


@pytest.mark.parametrize("were_equal", [True, False])
def test_what_was_loaded_before_replicas_were_equal_is_not_why(were_equal: bool) -> None:
    """Rank 3 alone did not load the optimizer; of each rank's two records the last differs."""
    loaded: list[dict[str, Any]] = [*[{"loads": [OPTIMIZER]}] * 3, {}]
    streams = {rank: [dict(of), dict(of)] for rank, of in enumerate(loaded)}
    first, last = ({rank: records[n] for rank, records in streams.items()} for n in (0, -1))
    found = with_origin(FOUND, len(loaded), streams, last, first if were_equal else {})
    assert (found == FOUND) is were_equal
    assert were_equal or "rank 3 did not load the optimizer" in found.reason
