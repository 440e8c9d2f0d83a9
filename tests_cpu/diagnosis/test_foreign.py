"""A folder of evidence is untrusted data: whatever it contains, the readers soon end, with a verdict or an error message."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.evidence.load import load
from pytest_nsa.evidence.shapes import read_beats, read_events
from pytest_nsa.wire.files import read_lines
from pytest_nsa.wire.messages import Job
from tests_cpu.faults.recorded import unpack

MODULES = ("groups_and_meshes", "crashes_and_exits", "waits_and_io", "training_steps", "collectives_on_devices")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the recorded folders of planted faults."""
    folder = tmp_path_factory.mktemp("recorded")
    for module in MODULES:
        unpack(module, folder / module)
    return sorted(path.parent for path in folder.glob("*/*/job.json"))


def test_no_line_of_the_recorded_folders_is_passed_over(recorded: list[Path]) -> None:
    """The readers' shapes are those of what ranks and hosts write."""
    unread: list[str] = []
    for folder in recorded:
        for path in (folder / "host.jsonl", *folder.glob("rank*/events.jsonl")):
            assert [*read_events(path, 1 << 17, unread)] == [*read_lines(path)], path
        for path in folder.glob("heartbeat_rank*.jsonl"):
            assert [*read_beats(path)] == [*read_lines(path)], path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": 10**8}, "world_size is 100000000: from 1 to 131072 can be read"),
        ({"world_size": -1}, "world_size is -1"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"nodeid": ["x" * 10**6]}, "nodeid is"),
        ({"traces": "all"}, "traces is 'all'"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_a_line(
    recorded: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    folder = shutil.copytree(recorded[0], tmp_path / "t")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | change))
    assert main(["diagnose", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert len(line) < 500


def test_a_folder_of_a_later_version_is_read(recorded: list[Path], tmp_path: Path) -> None:
    """Unknown fields and kinds of events are passed over."""
    before = load(recorded[0])
    folder = shutil.copytree(recorded[0], tmp_path / "t")
    job = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps(job | {"schema": 99, "colour": "red"}))
    with (folder / "host.jsonl").open("a") as file:
        file.write(json.dumps({"event": "sang", "time": before.started, "song": []}) + "\n")
    after = load(folder)
    assert (after.job, after.stop, after.unread) == (Job.from_json(job), before.stop, ())
    assert [r.exit_code for r in after.ranks] == [r.exit_code for r in before.ranks]


def test_what_is_passed_over_is_named(recorded: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(recorded[0], tmp_path / "t")
    with (folder / "rank0" / "events.jsonl").open("a") as file:
        file.write('{"event": "exception", "time": 1.0}\n{"event": "exception", "time": "now"}\n')
    assert main(["diagnose", str(folder)]) == 1
    assert capsys.readouterr().err.splitlines() == ["t: not read: rank0/events.jsonl: 2 lines of kind 'exception'"]


def test_links_out_of_the_folder_are_not_followed(recorded: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(recorded[0], tmp_path / "t")
    (folder / "rank0").rename(tmp_path / "elsewhere")
    (folder / "rank0").symlink_to(tmp_path / "elsewhere")
    (said,) = load(folder).unread
    assert said == "rank0: ValueError: a link, which may lead out of the folder"
