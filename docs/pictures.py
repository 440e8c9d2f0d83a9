"""Makes docs/images: the terminal of a run that hangs, and its report.html, from examples/downstream as it is.

`python docs/pictures.py` needs the extra `docs`, and Debian's chromium for the report (else that picture stays as it is).
"""

from __future__ import annotations

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
WIDTH = 132
CHROMIUM = "/usr/bin/chromium"


def run_example(folder: Path) -> str:
    """Run the example's tests in a copy; return what the terminal shows, with its colours."""
    shutil.copytree(ROOT / "examples" / "downstream", folder, ignore=shutil.ignore_patterns("artifacts", "*cache*"))
    plugins = [
        word
        for name in ("randomly", "hypothesispytest", "cov", "anyio", "rerunfailures")
        for word in ("-p", f"no:{name}")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--color=yes", "-p", "no:cacheprovider", *plugins, "-q", "--no-header"],
        cwd=folder, text=True, capture_output=True, check=False, env={**os.environ, "COLUMNS": str(WIDTH)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def draw_terminal(text: str) -> str:
    """Return an SVG of what a terminal shows."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ pytest\n" + text))
    return console.export_svg(title="pytest")


def photograph(page: Path, picture: Path) -> None:
    """Write a picture of a page, as a browser shows its first screen."""
    subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,1000",
         f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip


def main() -> int:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "downstream"
        shown = run_example(folder).replace(str(Path(sys.prefix)), ".venv")
        (IMAGES / "terminal.svg").write_text(draw_terminal(shown), encoding="utf-8")
        if Path(CHROMIUM).exists():
            photograph(folder / "artifacts" / "latest" / "report.html", IMAGES / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
