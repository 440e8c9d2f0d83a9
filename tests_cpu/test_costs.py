"""What a passing test costs, by counts that a busy machine does not change (`benchmarks/counts.py`)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import counts  # noqa: E402


def test_a_row_that_grows_by_more_than_a_tenth_is_named() -> None:
    table = {"files": 40.0, "minor faults": 20.0, "folders": 0.0, "gone": 1.0}
    assert counts.worse({"files": 44.0, "minor faults": 119.0, "folders": 0.0, "new": 9.0}, table) == []
    rows = {"files": 44.5, "minor faults": 121.0, "folders": 2.0}
    assert [line.partition(":")[0] for line in counts.worse(rows, table)] == ["files", "folders", "minor faults"]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_passing_test_costs_what_the_table_has_and_leaves_a_line() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "harness.py"), "--check"],
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode == 2:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    left = re.findall(r"(bytes|folders) left in artifacts: ([\d.]+)", done.stdout)
    assert [kind for kind, _ in left] == ["bytes", "folders"] * 2
    assert all(float(number) <= 1000 for kind, number in left if kind == "bytes")  # 1,000 tests leave 1 MB
    assert not any(float(number) for kind, number in left if kind == "folders")
