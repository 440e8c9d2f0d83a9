"""Whether this torch's FSDP2 runs on a CPU: that of torch 2.6 does not. What needs it is skipped, and the rest runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from nsa.training.parallel import has_fsdp2

HERE = has_fsdp2(torch.device("cpu"))
needs_fsdp2 = pytest.mark.skipif(not HERE, reason=f"FSDP2 of torch {torch.__version__} does not run on CPU")


def that_run(ways: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those of ``ways``, each the settings of a run, that can run here."""
    return [way for way in ways if HERE or way.get("parallel.mode") != "fsdp"]
