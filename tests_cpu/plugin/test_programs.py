"""Each test of the files in programs/ gets the verdict that stands behind its `def`."""

from pathlib import Path

import pytest

from tests_cpu.plugin.programs import FOLDER, differences, read_program, run_program

OTHERS = {"__init__", "faults", "tough"}  # test_faults and test_tough read more of these two
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - OTHERS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if read_program(n).is_slow else ()) for n in NAMES]
)
def test_verdicts(tmp_path: Path, name: str) -> None:
    result = run_program(name, tmp_path)
    if set(result.outcomes) == {"skipped"}:
        pytest.skip("this torch does not have what they use")
    found = differences(name, result)
    assert not found, "\n".join(found)
