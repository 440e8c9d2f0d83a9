"""``python -m nsa.train`` as a user runs it: the lines that it prints, its files, and what it refuses."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa import train
from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.yaml")


def under_torchrun(
    warm: WarmPython, *arguments: str, program: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the program under torchrun, on two ranks; or the file ``program``, which changes something and calls it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    started = [program] if program else ["-m", "nsa.train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = (*launcher, *started, "--config", TINY, *arguments)
    return warm.call(*command, cwd=ROOT, env=environment, timeout=150, nursery=True)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(warm: WarmPython) -> Run:
    """Return a function that runs the program in one process: exit code, output and errors."""

    def start(*arguments: str, **variables: str) -> tuple[int, str, str]:
        environment = {**os.environ, **variables}
        done = warm.call("-m", "nsa.train", "--config", TINY, *arguments, cwd=ROOT, env=environment, timeout=150)
        return done.returncode, done.stdout, done.stderr

    return start


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_boot_lines_and_progress(tmp_path: Path, run: Run) -> None:
    code, out, errors = run(
        "--steps", "2", "--out", str(tmp_path), NSA_GC_RANGE="0:6", NSA_TRACE_GRADS="1", NSA_MEM_DUMP_EVERY="1"
    )
    assert code == 0, errors
    lines = out.splitlines()
    assert (
        lines.pop(5)
        == "[train] model: 12 layers, dim 64, nsa attention by the backend cpu (our tiles serve torch.float32 on cpu)"
    )
    first_batch = lines.pop(6)
    assert re.fullmatch(r"\[train\] first batch after \d+\.\d\d s", first_batch)
    assert lines[:7] == [
        f"[boot] loading config {TINY}",
        "[env-guard] ok",
        "[train] dataset=synthetic tokenizer=byte",
        "[train] gradient_checkpointing=on range=0:6",
        "[trace] overriding steps to 2",
        "[trace] grad-arrival hooks registered",
        "[debug] step 1: input shape torch.Size([4, 128]), seq_len 128",
    ]
    assert "[GRAD-TRACE] after_backward_step1 arrived=195 missing=0" in lines
    progress = (
        r"\[train\] step 1/2 loss 5\.\d+ lr 1\.50e-04 tokens/s \d+ peak \d+ MiB gates cmp 0\.\d+ sel 0\.\d+ win 0\.\d+"
    )
    assert re.search(progress, out)
    assert {p.name for p in tmp_path.iterdir()} >= {
        "metrics.jsonl", "traces.log", "heartbeat_rank0.jsonl", "mem_step1_rank0.json", "mem_step1_rank0.txt",
        "k_stats.csv", "fallback_counters.csv", "gate_health.jsonl", "dtypes_report.txt",
    }  # fmt: skip


DETACHED_ON_RANK_1 = """
if os.environ["RANK"] == "1":
    gate = model.blocks[4].attn.gate.fc2
    gate.forward = lambda x: F.linear(x, gate.weight.detach(), gate.bias)
"""


def planted(change: str) -> str:
    """Return a program that trains as `nsa.train` does, after a change of ``model``."""
    return f"""
import os, sys
import torch.nn.functional as F
from nsa.training import trainer

build = trainer.build_model

def planted(config, device):
    model = build(config, device)
{textwrap.indent(change, "    ")}
    return model

trainer.build_model = planted
from nsa.train import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_gradient_that_is_missing_on_rank_1_alone_is_in_every_trace(warm: WarmPython, tmp_path: Path) -> None:
    """DDP looks for unused parameters here, so that the run goes on: the traces alone have it."""
    (tmp_path / "train.py").write_text(planted(DETACHED_ON_RANK_1))
    arguments = ("--ddp", "1", "--steps", "1", "--set", "parallel.find_unused_parameters=true", "--out", str(tmp_path))
    result = under_torchrun(
        warm,
        *arguments,
        program=str(tmp_path / "train.py"),
        NSA_TRACE_GRADS="1",
        TORCH_BACKEND="gloo",
        PYTHONPATH=str(ROOT),
    )
    assert result.returncode == 0, result.stderr
    name = "blocks.4.attn.gate.fc2.weight"
    of_rank_1 = ["[rank 1] [GRAD-TRACE] after_backward_step1 arrived=194 missing=1", f"[rank 1]   - MISSING: {name}"]
    for text in (result.stdout, (tmp_path / "traces.log").read_text()):
        assert [line for line in text.splitlines() if line.startswith("[rank 1]")] == of_rank_1
        assert "[GRAD-TRACE] after_backward_step1 arrived=195 missing=0\n" in text
    assert f"  - MISSING: {name}\n" in (tmp_path / "traces_rank1.log").read_text()
    assert (tmp_path / "all_missing_params.txt").read_text() == f"step1 {name} rank=1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", TINY, "--dataset", "nowhere.parquet"], "dataset 'nowhere.parquet': no such file or folder"),
        (["--config", TINY, "--device", "cuda"], "--device cuda: torch sees no GPU; use --device cpu"),
        (["--config", TINY, "--resume", "gone", "--steps", "1"], "--resume 'gone': no such folder"),
        (["--config", "nowhere.yaml"], "config 'nowhere.yaml': No such file or directory"),
        (
            ["--config", TINY, "--device", "cpu", "--set", "model.backend=flash"],
            "model.backend='flash': flash-attn needs a GPU, and the tensors are on cpu; use backend='auto'",
        ),
        ([], "no configuration: give --config PATH, or CONFIG=PATH"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONFIG", raising=False)
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_what_needs_no_torch_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    given = ("--resume", "gone"), ("--resume", "auto"), ("--dataset", "nowhere.parquet"), ("--set", "train.lr=abc")
    commands = [["--config", TINY, *words] for words in given]
    code = f"import sys; from nsa import train; print([train.main(c) for c in {commands}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[2, 2, 2, 2] False"
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "] * 4


def test_ranks_that_would_train_apart_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--config", TINY]) == 2
    assert "MASTER_ADDR and MASTER_PORT not: start the ranks with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert train.main(["--config", TINY]) == 2
    assert "2 ranks with --parallel none would train 2 unrelated models; use --ddp 1" in capsys.readouterr().err


def test_a_folder_that_another_run_writes_to_is_refused(warm: WarmPython, tmp_path: Path, run: Run) -> None:
    command = ("-m", "nsa.train", "--config", TINY, "--out", str(tmp_path), "--steps")
    first = warm.popen(*command, "10000", cwd=ROOT, stdout=subprocess.PIPE)
    assert next(line for line in first.stdout if "first batch" in line)
    code, _, errors = run("--out", str(tmp_path), "--steps", "1")
    first.kill()
    first.communicate()
    assert code == 2
    says = f"process {first.pid} leaves its evidence there; give another folder, or wait until it has ended"
    assert errors == f"error: --out '{tmp_path}': {says}\n"


def test_a_misspelt_variable_is_warned_of(tmp_path: Path, run: Run) -> None:
    _, out, _ = run("--steps", "1", "--out", str(tmp_path), NSA_TRACE_GRAD="1", NSA_TRACE_HOST="1")
    assert (
        "[env-guard] warning: NSA_TRACE_GRAD is not a variable of this program; did you mean 'NSA_TRACE_GRADS'?" in out
    )
    assert out.count("[env-guard]") == 1


def test_help_lists_the_variables_and_the_exit_codes_as_the_page_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text, page = capsys.readouterr().out, (ROOT / "docs" / "training.md").read_text()
    for code, meaning in train.EXIT_CODES.items():
        assert f"  {code:<4} {meaning}\n" in f"{text}\n"
        assert f"| {code} | " in page
    for name in (
        "NSA_TRACE_GRADS=0|1",
        "NSA_GC_RANGE=start:end",
        "NSA_FORCE_BRANCH=cmp|sel|win",
        "TORCH_BACKEND=nccl|gloo",
        "`pytest-nsa diagnose DIR --html` draws the losses",
    ):
        assert name in text


def test_a_printed_configuration_is_the_one_that_was_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all fields: those of the file, of variables and of options; read again from another folder."""
    monkeypatch.setenv("NSA_GC_RANGE", "3:9")
    settings = ["--steps", "7", "--safe", "--set", "train.lr=1e-3", "--dataset", "fineweb_edu"]
    assert train.main(["--config", TINY, *settings, "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "\n  steps: 7\n" in text
    assert "\n  gc_range: '3:9'\n" in text
    (tmp_path / "printed.yaml").write_text(text)
    monkeypatch.delenv("NSA_GC_RANGE")
    assert train.main(["--config", str(tmp_path / "printed.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == text


JOIN = "from nsa.training.parallel import join_group; join_group('gloo', 5.0, 0.5)"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("no-such-host.invalid", "the host name no-such-host.invalid resolves to no address here"),
        ("127.0.0.1", "is in use by another process; take another one (MASTER_PORT)"),
    ],
)
def test_an_address_that_cannot_be_used_is_named_in_a_line(warm: WarmPython, address: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(taken.getsockname()[1])}
        done = warm.call("-c", JOIN, cwd=ROOT, env={**os.environ, **variables})
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("nsa.config.ConfigError: ")
    assert says in last


@pytest.mark.parametrize("name", ["traces.log", "gate_health.jsonl", "metrics.jsonl"])
def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, run: Run, name: str) -> None:
    """A full disk at the start and after a step (/dev/full refuses each write as one does), and a folder in a file's place."""
    path = tmp_path / name
    full, is_folder = f"No space left on device: the results in {tmp_path}", name == "metrics.jsonl"
    path.mkdir() if is_folder else path.symlink_to("/dev/full")
    code, _, errors = run("--steps", "2", "--out", str(tmp_path))
    assert code == 2, errors
    assert errors.startswith(f"error: {f'Is a directory: {path}' if is_folder else full} cannot be written; ")
    assert len(errors.splitlines()) == 1


def test_output_that_nobody_reads_ends_the_training_in_one_line(tmp_path: Path, warm: WarmPython) -> None:
    command = ("-m", "nsa.train", "--config", TINY, "--steps", "2", "--out", str(tmp_path))
    with warm.popen(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as training:
        training.stdout.close()
        errors = training.stderr.read()
    assert training.returncode == 130, errors
    assert len(errors.splitlines()) == 1
