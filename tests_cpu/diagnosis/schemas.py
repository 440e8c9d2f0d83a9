"""A folder of every schema that was ever written, which must stay readable: recorded when a schema number changes.

python -m tests_cpu.diagnosis.schemas       # takes two folders of the corpus as recorded last (pytest tests_cpu/faults --record)
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path

from nsa.trace import board, events
from pytest_nsa.diagnosis import verdict
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
from pytest_nsa.wire import messages
from tests_cpu.faults.recorded import unpack

FOLDER = Path(__file__).with_name("schemas")
TAKEN = (
    ("point_to_point", "test_a_send_that_is_dropped"),
    ("collective_arguments", "test_a_gather_of_fewer_in_one_round"),
)


def current() -> str:
    """Return the name of the archive of the schemas that are written now."""
    return f"job{messages.SCHEMA}-events{events.SCHEMA}-board{board.SCHEMA}-verdict{verdict.SCHEMA}.tar.xz"


def main() -> None:
    """Record the current schemas: each folder with its verdict.json."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(FOLDER / current(), "w:xz", preset=9) as archive:
        for module, name in TAKEN:
            folder = unpack(module, Path(scratch) / module)[name]
            text = json.dumps(diagnose(load(folder)).to_json(), indent=1)
            (folder / "verdict.json").write_text(text, encoding="utf-8")
            for file in sorted(p for p in folder.rglob("*") if p.is_file()):
                data = file.read_bytes()
                entry = tarfile.TarInfo(f"{name}/{file.relative_to(folder)}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
