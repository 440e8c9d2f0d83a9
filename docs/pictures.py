"""Makes docs/images: the terminal, wide and of 80 columns, and report.html of examples/downstream as it is; the report on a phone,
in the dark, of 64 ranks.

`python docs/pictures.py` needs the extra `docs`, and Debian's chromium for all but the terminal (else those stay as they are).
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = Path(__file__).with_name("images")
WIDTH, NARROW = 132, 80
CHROMIUM = "/usr/bin/chromium"
DARK = "--blink-settings=preferredColorScheme=0"
MANY = """
import threading
import torch
import torch.distributed as dist
from pytest_nsa import world_size

lock = threading.Lock()

def copy_to_disk(step):
    if step == 2 and dist.get_rank() == 37:
        lock.acquire()
    with lock:
        return step

@world_size(64)
def test_sixty_four(group):
    for step in range(5):
        dist.all_reduce(torch.ones(8))
        copy_to_disk(step)
"""


def run_example(folder: Path, width: int = WIDTH) -> str:
    """Run the example's tests in a copy; return what the terminal shows, with its colours."""
    shutil.copytree(ROOT / "examples" / "downstream", folder, ignore=shutil.ignore_patterns("artifacts", "*cache*"))
    plugins = [
        word
        for name in ("randomly", "hypothesispytest", "cov", "anyio", "rerunfailures")
        for word in ("-p", f"no:{name}")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--color=yes", "-p", "no:cacheprovider", *plugins, "-q", "--no-header"],
        cwd=folder, text=True, capture_output=True, check=False, env={**os.environ, "COLUMNS": str(width)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.replace(str(Path(sys.prefix)), ".venv")


def draw_terminal(text: str, width: int = WIDTH) -> str:
    """Return an SVG of what a terminal shows."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ pytest\n" + text))
    return console.export_svg(title="pytest")


def photograph(page: Path, picture: Path, size: str = "1200,1000", *options: str) -> None:
    """Write a picture of a page, as a browser shows its first screen."""
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}", *options,
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip


def run_tests(folder: Path, *arguments: str, **variables: str) -> Path:
    """Run pytest, and return the folder of the run."""
    artifacts = folder / "artifacts"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--ranks-artifacts={artifacts}", *arguments],
        cwd=folder, env={**os.environ, **variables}, capture_output=True, check=False,
    )  # fmt: skip
    return (artifacts / "latest").resolve()


def photograph_more(folder: Path, report: Path) -> None:
    """The same report on a phone and in the dark, and one of 64 ranks."""
    photograph(report, IMAGES / "report_phone.png", "390,1300")
    photograph(report, IMAGES / "report_dark.png", "1200,700", DARK)
    (folder / "many").mkdir()
    (folder / "many" / "test_many.py").write_text(MANY, encoding="utf-8")
    many = run_tests(folder / "many", "-o", "ranks_hang_after=3")
    photograph(many / "report.html", IMAGES / "report_64_ranks.png", "1200,940")


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "downstream"
        (IMAGES / "terminal.svg").write_text(draw_terminal(run_example(folder)), encoding="utf-8")
        narrow = run_example(Path(temporary) / "narrow", NARROW)
        (IMAGES / "terminal_80.svg").write_text(draw_terminal(narrow, NARROW), encoding="utf-8")
        if Path(CHROMIUM).exists():
            report = folder / "artifacts" / "latest" / "report.html"
            photograph(report, IMAGES / "report.png", "1100,720")
            photograph_more(Path(temporary), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
