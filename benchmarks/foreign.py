"""How often a verdict on what other tools left is right: public cases, and dumps of NCCL jobs.

    python benchmarks/foreign.py --json benchmarks/results/foreign.json [--nccl DIR]

``DIR`` has a folder per incident of NCCL with a file `ranks` ('12 14'). hangs.py has the figures of gloo's dumps.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from analyzers import HAS_NVRX, ask_nvrx, ask_torch
from figures import keep, parser_of

from pytest_nsa.diagnosis.foreign import judge
from pytest_nsa.foreign.find import read_job
from tests_cpu.foreign.cases import CASES


def of_cases() -> dict[str, bool]:
    """Return whether each public case was named."""
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            for file, text in case.files.items():
                Path(folder, file).write_text(text)
            verdict, _ = judge(read_job([Path(folder)]), name)
        found[name] = verdict.ranks == case.ranks and verdict.cause in case.causes
    return found


def of_nccl(folder: Path) -> dict[str, Any]:
    """Return the ranks that each incident's dumps name, those that were injected, and what others name; the seconds it took."""
    found = {}
    for incident in sorted(path for path in folder.iterdir() if (path / "ranks").is_file()):
        began = time.perf_counter()
        verdict, _ = judge(read_job(sorted(incident.glob("_dump_*"))), incident.name)
        wanted = [int(n) for n in (incident / "ranks").read_text().split()]
        found[incident.name] = {
            "found": list(verdict.ranks),
            "injected": wanted,
            "seconds": round(time.perf_counter() - began, 2),
            "by torch's analyzer": ask_torch(incident, "_dump_"),
            **({"by NVRx's analyzer": ask_nvrx(incident, "_dump_")} if HAS_NVRX else {}),
        }
    return found


def main() -> None:
    """Judge both, and keep the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--nccl", type=Path, help="a folder of incidents, each with dumps and a file `ranks`")
    arguments = parser.parse_args()
    figures = {
        "public cases": of_cases(),
        "nccl": of_nccl(arguments.nccl) if arguments.nccl else {},
    }  # fmt: skip
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
