"""The commands that README.md, docs/ and the examples show: each block runs in a clone, and gives what the page shows."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "examples").rglob("*.md"),
]
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:pip|pytest|pytest-nsa|python|torchrun|make|srun)\b|two\(\)|#!/bin/bash")
# In prose: `python -m nsa.train --config FILE --out DIR`.
_IN_PROSE = re.compile(r"`((?:pytest-nsa(?: [^`]*)?|python -m [^`]*|python benchmarks/[^`]*|make [a-z][^`]*))`")
HANGS = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(1000):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(2))
"""


@dataclass(frozen=True)
class Run:
    """The run of a block: a bash script ('' for the block itself), what it prints, its exit code, its working directory."""

    script: str
    prints: str
    code: int = 0
    folder: str = "."


# By a block's first words. A command that takes minutes is shortened by its own options.
BLOCKS = {
    "NSA_TRACE_DIR=/tmp/run torchrun": Run(
        f"""cat > train.py <<'END'
{HANGS}
END
NSA_TRACE_DIR=$PWD/run timeout 60 torchrun --standalone --nproc_per_node=2 train.py > trained 2>&1 & launcher=$!
until [ -f run/job.json ]; do sleep 0.1; done
timeout 60 pytest-nsa watch --run run --on-verdict "kill $launcher" > watched; pytest-nsa diagnose run""",
        "sleeping (95% sure), at train.py:8",
        code=1,
    ),
    "pip install PATH": Run("", ""),
    "pytest-nsa diagnose dumps/": Run(
        """for rank in 0 2; do
echo "[Rank $rank] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8)" >> job.log
done; pytest-nsa diagnose job.log""",
        "rank 1 never entered allreduce #5",
        code=1,
    ),
    "pytest-nsa watch 31415": Run(
        """for rank in 0 1 2; do
[ $rank = 1 ] || wait="[Rank $rank] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=8)"
waits='import sys, time; print(sys.argv[1], flush=True); time.sleep(100)'
RANK=$rank WORLD_SIZE=3 python -c "$waits" "$wait" > log_$rank & pids="$pids $!"
wait=""
done
until [ -s log_2 ]; do sleep 0.1; done
timeout 90 pytest-nsa watch $! --on-verdict "kill $pids" """,
        "rank 1 never entered allreduce #5",
        code=1,
    ),
    "make plan     # the diagnostic plan": Run("make plan PHASES=2", "Nothing is wrong"),
    "pip install -e '.[test]' 'torch": Run("pytest tests_cpu/plan/test_plan.py --phases 2 -v", "Nothing is wrong"),
    "make plan FAULT=": Run("make plan FAULT=sel_backward_deadlock ARGS='-k sel'", "lock_deadlock", code=2),
    "pytest tests_cpu/plan/test_plan.py --phases 1-5 --fault gc_reentrant": Run(
        "pytest tests_cpu/plan/test_plan.py --phases 1 --fault gc_reentrant --bisect-mitigations",
        "bisect: passes with NSA_WITH_DDP_STATIC_GRAPH=1 alone (10 runs)",
        code=1,
    ),
    "python -m nsa.train": Run("", "step 100"),
    "two() {": Run("", ""),
    "torchrun --nproc_per_node=2 -m pytest": Run("", "1 failed, 1 passed", code=1, folder="examples/downstream"),
    "#!/bin/bash": Run("bash -n ../job.sh && echo sound", "sound"),
    "pip install ../.. -e '.[test]'": Run("pytest", "1 failed, 1 passed", code=1, folder="examples/downstream"),
}


def blocks(page: Path) -> Iterator[str]:
    """Yield the indented and fenced blocks of a page that hold commands, without their margin."""
    block: list[str] = []
    fence = ""
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("```"):
            fence = "" if fence else line[3:] or "text"
        elif (fence in ("bash", "sh") and line) or (not fence and line.startswith("    ")):
            block.append(line.removeprefix("    "))
            continue
        if not fence and block and not (line == "" and len(block) > 1 and block[0].startswith("#!")):
            if _COMMAND.match(block[0]) and "->" not in block[0]:  # a drawing
                yield "\n".join(block) + "\n"
            block = []


DOCUMENTED = [(page, block) for page in PAGES for block in blocks(page)]


def run_of(block: str) -> Run:
    found = [run for start, run in BLOCKS.items() if block.startswith(start)]
    assert len(found) == 1, f"no entry of BLOCKS for the commands\n{block}"
    return found[0]


def test_every_block_of_commands_has_an_entry() -> None:
    entries = [run_of(block) for _, block in DOCUMENTED]
    assert sorted(map(id, entries)) == sorted(map(id, BLOCKS.values()))


def test_commands_in_prose_are_there() -> None:
    """Targets of make, modules, subcommands and programs that pages name in their sentences exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for command in _IN_PROSE.findall(page.read_text(encoding="utf-8")):
            program, _, rest = command.partition(" ")
            word = rest.split()[0] if rest.split() else ""
            if program == "make":
                assert word in targets, f"{page.name}: {command}"
            elif program == "pytest-nsa":
                assert word in ("", "watch", "diagnose", "report", "clean", "compare", "explain"), (
                    f"{page.name}: {command}"
                )
            elif word == "-m":
                module = rest.split()[1].replace(".", "/")
                assert (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir(), f"{page.name}: {command}"
            else:
                assert (ROOT / word).is_file(), f"{page.name}: {command}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of the repository with its uncommitted changes, beside links to this environment."""
    folder = tmp_path_factory.mktemp("documented") / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    changed = subprocess.run(["git", "diff", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    if changed:
        subprocess.run(["git", "apply"], cwd=folder, input=changed, check=True)
    environment = folder.parent / "environment"
    environment.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (environment / name).symlink_to(Path(sys.prefix) / name)
    (environment / "installed-torch==2.13.0").touch()  # so make installs nothing
    return folder


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("page", "block"), DOCUMENTED, ids=lambda x: x.split("\n")[0][:30] if isinstance(x, str) else x.stem
)
def test_the_commands_of_a_page(page: Path, block: str, clone: Path) -> None:
    run = run_of(block)
    (clone.parent / "job.sh").write_text(block)
    # A program that is started by hand does not get the variables that pytest sets for its children.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = {
        **outer, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1",
        "VENV": str(clone.parent / "environment"), "PYTEST_ADDOPTS": "-p no:randomly",  # ranks of a launcher collect alike
    }  # fmt: skip
    script = clone.parent / "documented.sh"  # given on a command line, it would match what a block kills by pattern
    script.write_text(run.script or block)
    done = subprocess.run(
        ["bash", script], cwd=clone / run.folder, env=environment, text=True, capture_output=True, timeout=165
    )
    said = done.stdout + done.stderr
    assert done.returncode == run.code, said[-3000:]
    assert run.prints in said, said[-3000:]
    if block.startswith("two()"):
        losses = re.findall(r'"loss": [\d.]+', done.stdout)
        assert len(losses) == 2
        assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_benchmarks_describe_themselves() -> None:
    for program in sorted((ROOT / "benchmarks").glob("*.py")):
        text = program.read_text(encoding="utf-8")
        if "argparse" in text and "__main__" in text:
            done = subprocess.run([sys.executable, program, "--help"], text=True, capture_output=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert program.name in done.stdout
