"""Diagnosis by number of ranks: a test in which one rank skips a collective, with as many ranks as given.

    python benchmarks/scale.py [--ranks 2 4 8 ...] [--json FILE]

Figures are the seconds from the start of the test to the stop, and from the stop to the verdict.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from figures import keep, parser_of, run_tests

SKIPS = """
import torch, torch.distributed as dist
from pytest_nsa import world_size

@world_size({n})
def test_skips(group):
    for step in range(4):
        dist.all_reduce(torch.ones(8))
        if not (group.rank == {n} // 3 and step == 2):
            dist.all_reduce(torch.ones(2))
"""


def real(n: int, folder: Path) -> dict[str, Any]:
    """Run pytest on ``n`` ranks once; return the figures."""
    (folder / "test_scale.py").write_text(SKIPS.format(n=n))
    (verdict,) = run_tests(folder, "-o", "ranks_timeout=120").values()
    right = (verdict["cause"], verdict["ranks"]) == ("skipped_collective", [n // 3])
    return {"ranks": n, "right": right, "test_s": verdict["duration_s"], "verdict_s": verdict["time_to_verdict_s"]}


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    arguments = parser.parse_args()
    found = []
    for n in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found.append(real(n, Path(folder)))
        print(json.dumps(found[-1]), flush=True)
    keep({"real": found}, arguments.json)


if __name__ == "__main__":
    main()
