"""Commands on folders that are damaged at random, or were made to do harm: each ends, in words, and changes nothing elsewhere.

A seed makes one damaged run; every command is a process of its own, with bounds on its memory and time.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from tests_cpu.diagnosis.test_strangers import contents
from tests_cpu.faults.recorded import unpack

Damage = Callable[[Path, random.Random], object]
LIMIT_S = 60
MEMORY = 1 << 30  # bytes that a command may add to those of this process
IMAGE, TITLE = "<img src=x onerror=x>", "\x1b]0;owned\x07"
LARGE, HUGE = "9" * 401, 20 << 30
TESTS = {"crashes_and_exits": 2, "waits_and_io": 1, "collective_order": 1, "point_to_point": 1}
SEEDS = 320
BLOCKS = 16

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, 1e300, float("nan"), float("inf"), "", "..", "/etc/shadow", "../../outside/secret",
    IMAGE, f"\\{IMAGE}", f"{TITLE}\n# Everything passed", "FAIL);background-image:url(http://x)", "|" * 50, "`" * 7, "\0", "\ud800",
    "x" * 100_000, [], {}, [[[]]], {"x": None}, [1] * 10_000, "javascript:x", "</script>", "rank9999999999",
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, which its reports are written of."""
    root = tmp_path_factory.mktemp("good")
    run = root / "test_engineer_20260101_000000"
    run.mkdir()
    for archive, count in TESTS.items():
        found = unpack(archive, root / archive)
        for name in sorted(found)[:count]:
            shutil.move(found[name], run / name)
        shutil.rmtree(root / archive)
    assert main(["report", str(run)]) == 1
    for path in run.glob("*/perfetto.json"):  # so that each one that is there later was written of damaged evidence
        path.unlink()
    return run


def a_part_of(value: Any, draw: random.Random) -> Any:
    """Return a value of JSON in which one part is another."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {**value, draw.choice((IMAGE, TITLE, "schema", "")): draw.choice(ODD)}
        return {**value, key: a_part_of(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], a_part_of(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def in_json(path: Path, draw: random.Random) -> None:
    lines = path.read_text(errors="replace").splitlines() or [""]
    whole = path.suffix == ".json"
    at = draw.randrange(len(lines))
    try:
        changed = json.dumps(a_part_of(json.loads("\n".join(lines) if whole else lines[at]), draw))
    except (ValueError, RecursionError):  # it is damaged already
        changed = "[" * 200_000
    path.write_text(changed if whole else "\n".join([*lines[:at], changed, *lines[at + 1 :]]) + "\n")


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def in_bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 10, 1000))):
        if data:
            data[draw.randrange(len(data))] = draw.choice((0, 255, 10, draw.randrange(256)))
    path.write_bytes(data)


def a_number(path: Path, draw: random.Random) -> None:
    text = path.read_bytes()
    numbers = [m.span() for m in re.finditer(rb"\d+(\.\d+)?", text)]
    if numbers:
        begin, end = draw.choice(numbers)
        path.write_bytes(text[:begin] + draw.choice((LARGE, "NaN", "1e400", "-1", "1e300")).encode() + text[end:])


def in_the_header(path: Path, draw: random.Random) -> None:
    """Change the layout in the header of the board next to a file, if there is one."""
    path = path.with_name("board.bin")
    if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 24:  # made large before
        return
    data = path.read_bytes()
    try:
        layout = a_part_of(json.loads(data[:4096].rstrip(b"\0 ")), draw)
    except (ValueError, RecursionError):  # damaged before
        return
    path.write_bytes(json.dumps(layout).encode()[:4096].ljust(4096, b"\0") + data[4096:])


def in_place(make: Callable[[Path], object]) -> Damage:
    def damage(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


DAMAGES: tuple[Damage, ...] = (
    in_json, in_json, in_json, in_json, in_json, cut, in_bytes, a_number, in_the_header, in_the_header,
    in_place(Path.mkdir), in_place(os.mkfifo), in_place(sparse), in_place(lambda path: None),
    in_place(lambda path: path.write_text("[" * 200_000)), in_place(lambda path: path.write_text('{"a":' * 50_000)),
    in_place(lambda path: path.write_bytes(b"\xff\xfe\0" * 1000)), in_place(lambda path: path.symlink_to("/dev/zero")),
    in_place(lambda path: path.symlink_to("/etc/shadow")), in_place(lambda path: path.symlink_to(path.name)),
    in_place(lambda path: path.symlink_to(outside(path) / "secret")),
)  # fmt: skip


def outside(path: Path) -> Path:
    return next(parent for parent in path.parents if (parent / "outside").is_dir()) / "outside"


def damage_a_file(folder: Path, draw: random.Random) -> None:
    """Damage a file of the folder itself: through a link the damage would be done outside of it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    small = [path for path in files if path.stat().st_size < 1 << 24 and path.suffix != ".html"]
    draw.choice(DAMAGES)(draw.choice(small), draw)


def damage_a_folder(run: Path, draw: random.Random) -> None:
    """Give a folder another name, or put a link in its place."""
    ranks = sorted(path for path in run.glob("*/rank*") if path.is_dir() and not path.is_symlink())
    match draw.randrange(6):
        case 0 if ranks:
            folder = draw.choice(ranks)
            folder.rename(
                folder.with_name(draw.choice(("rank-1", "rank99999999999999999999", "rank7", "rankX", "rank01")))
            )
        case 1 if ranks:
            folder = draw.choice(ranks)
            shutil.rmtree(folder)
            folder.symlink_to(draw.choice(("/", "/dev", str(outside(run)), ".")))
        case 2:
            folder = draw.choice(sorted(path.parent for path in run.glob("*/job.json")))
            folder.rename(folder.with_name(draw.choice((TITLE, "x" * 200, "..x", IMAGE.replace("/", "")))))
        case 3:
            (run / "planted").symlink_to(outside(run))
        case 4:
            for name in ("SUMMARY.md", "report.html", "verdicts.jsonl"):
                if (run / name).is_dir() and not (run / name).is_symlink():  # an earlier damage made it one
                    shutil.rmtree(run / name)
                (run / name).unlink(missing_ok=True)
                (run / name).symlink_to(outside(run) / "secret")


def damaged(good: Path, root: Path, seed: int) -> Path:
    """Make a copy of the run with some damage in it, and what must stay as it is next to it."""
    draw = random.Random(seed)
    (root / "outside").mkdir(parents=True)
    (root / "outside" / "secret").write_text("secret-6021")
    run = root / "artifacts" / good.name
    shutil.copytree(good, run)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        damage_a_file(run, draw)
    if draw.random() < 0.4:
        damage_a_folder(run, draw)
    return run


def in_a_process(body: Callable[[], int], told: Path) -> int | None:
    """Return the exit code of ``body`` in a child with bounds, or its negative signal; ``told`` gets what it prints."""

    def bounded() -> None:
        sys.stdout = sys.stderr = told.open("w", encoding="utf-8", errors="backslashreplace")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        sys.exit(body())

    child = multiprocessing.get_context("fork").Process(target=bounded)
    child.start()
    child.join()
    return child.exitcode


def commands(run: Path, good: Path) -> list[list[str]]:
    test = min(path for path in run.iterdir() if path.is_dir())
    return [
        ["diagnose", str(run)], ["diagnose", "--json", str(run)], ["watch", "--once", "--run", str(test)],
        ["compare", str(good), str(run)], ["diagnose", "--html", str(run)],
        ["report", str(run)], ["clean", "--keep", "0", "--keep-failed", "0", str(run.parent)],
    ]  # fmt: skip


def check_written(run: Path) -> None:
    """Assert that what the commands have left acts on nobody, and that programs can read it."""
    for page in (*run.glob("*.html"), run / "SUMMARY.md"):
        if page.is_file() and not page.is_symlink():
            text = page.read_text(errors="replace")
            own = re.sub(r"<script( type=\"application/json\"[^>]*)?>.*?</script>", "", text, flags=re.S)
            assert not re.search("<img|</?script", own), page
            assert "\x1b" not in text
    for path in run.glob("*/perfetto.json"):
        if not path.is_symlink() and path.is_file():
            json.loads(path.read_text())


def check_seed(good: Path, root: Path, seed: int) -> None:
    run = damaged(good, root, seed)
    before = contents(root / "outside")
    told = root / "told"
    for command in commands(run, good):
        code = in_a_process(lambda command=command: main(command), told)  # type: ignore[misc]
        text = told.read_text(errors="replace")
        assert code in (0, 1, 2), (seed, command, code, text[-3000:])
        assert "Traceback" not in text, (seed, command, text[-3000:])
        assert not re.search(r"\x1b(?!\[[0-9;]*m)", text), (seed, command)
        assert "secret-6021" not in text
        if "--json" in command and command[0] == "diagnose":
            rows = [line for line in text.splitlines() if line.startswith("{")]
            for row in rows:
                json.loads(row, parse_constant=lambda name: pytest.fail(f"{seed}: {name} is no JSON"))
        if command[0] in ("diagnose", "report"):
            check_written(run)
    assert contents(root / "outside") == before, seed
    assert (root / "outside" / "secret").read_text() == "secret-6021"


@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_folder_is_diagnosed_in_words(good: Path, tmp_path: Path, seed: int) -> None:
    check_seed(good, tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_hundreds_of_damaged_folders_are(good: Path, tmp_path: Path, block: int) -> None:
    for seed in range(5 + block, SEEDS, BLOCKS):
        check_seed(good, tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed))
