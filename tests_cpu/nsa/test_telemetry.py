"""What a training leaves agrees with docs/artifacts.md, file by file and field by field."""

import csv
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.config import load_config
from nsa.kernels import blocks
from nsa.model.transformer import build_model
from nsa.trace.board import Board
from nsa.trace.stall.watchdog import Watchdog
from nsa.training.metrics import Metrics
from nsa.training.statistics import GateStatistics, SelectionStatistics
from nsa.training.trainer import StepResult
from pytest_nsa.cli.main import main as command
from tests_cpu.nsa.test_train import planted
from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "tiny_cpu.yaml"
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "number?": (int, float, type(None)), "string": (str,), "object": (dict,),
    "array": (list,), "boolean": (bool,),
}  # fmt: skip


def schemas() -> dict[str, dict[str, str]]:
    """Return the type of each field by file, as the document has it."""
    found: dict[str, dict[str, str]] = {}
    for part in (ROOT / "docs" / "artifacts.md").read_text().split("\n## ")[1:]:
        name, _, text = part.partition("\n")
        rows = re.findall(r"^\| (\w+) \| (integer|number\??|string|object|array|boolean) \|", text, re.MULTILINE)
        if rows:
            found[name] = dict(rows)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warm: WarmPython) -> Path:
    folder = tmp_path_factory.mktemp("run")
    command = f"-m nsa.train --config {TINY} --steps 12 --save-every 6 --out {folder / 'out'}".split()
    variables = {**os.environ, "NSA_MEM_DUMP_EVERY": "6", "HF_TOKEN": "hush"}
    done = warm.call(*command, cwd=folder, env=variables)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def entries(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects or rows of the files that a heading names."""
    paths = sorted(run.glob(re.sub(r"(?<=rank|step)N|(?<=step_)N", "*", name)))
    assert paths, name
    for path in paths:
        if path.suffix == ".jsonl":
            yield from map(json.loads, path.read_text().splitlines())
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                yield from csv.DictReader(file)
        else:
            yield json.loads(path.read_text())


@pytest.mark.parametrize("name", schemas())
def test_each_file_is_as_documented(run: Path, name: str) -> None:
    schema, count = schemas()[name], 0
    for entry in entries(run, name):
        assert list(entry) == list(schema)
        for field, kind in schema.items():
            value = entry[field]
            if name.endswith(".csv") and kind != "string":
                value = int(value) if kind == "integer" else float(value)
            assert isinstance(value, TYPES[kind]), (field, value)
        count += 1
    assert count >= 1


def test_no_file_is_left_undescribed(run: Path) -> None:
    text = (ROOT / "docs" / "artifacts.md").read_text()
    for path in run.iterdir():
        general = re.sub(r"(?<=rank|step)\d+", "N", path.name).removesuffix(".txt")
        assert general in text, path.name


def test_statistics_of_a_selection_that_is_known() -> None:
    config = load_config(TINY, n_layers=1)
    model = build_model(config)
    statistics = SelectionStatistics(model)
    statistics.listen(True)
    S, n = 64, blocks.num_selection(64, 16)
    chosen = torch.zeros(1, S, 1, n, dtype=torch.bool)
    chosen[0, torch.arange(S), 0, torch.arange(S) // 16] = True  # each query picks its own block
    model.blocks[0].attn.selection_listener(chosen)
    (row,) = statistics.rows().values()
    assert row == {"blocks_mean": 1, "distance_mean": 0, "entropy": 0, "share_initial": 0.25, "share_local": 1}
    chosen[0, 16:, 0, 0] = True  # and, except in the first block, the initial one
    statistics.listen(True)
    model.blocks[0].attn.selection_listener(chosen)
    (row,) = statistics.rows().values()
    shares = torch.tensor([64, 16, 16, 16], dtype=torch.float64) / 112
    assert row["entropy"] == pytest.approx(-(shares * shares.log()).sum().item())
    assert row["distance_mean"] == pytest.approx((16 * (1 + 2 + 3)) / 112)


def test_a_gate_that_dies_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(load_config(TINY, n_layers=2))
    statistics = GateStatistics(model)
    gate = model.blocks[1].attn.gate
    with torch.no_grad():
        gate.fc2.bias[0::3] = -20.0  # cmp, of every head
    for step in (1, 2):
        model(torch.randint(0, 256, (1, 32)))
        with caplog.at_level("WARNING", "nsa.trace"):
            statistics.write(tmp_path / "gate_health.jsonl", step)
    assert [r.getMessage() for r in caplog.records] == [
        "[gates] step 1: the gate of branch cmp has died out in blocks.1.attn.gate"
    ]
    line = json.loads((tmp_path / "gate_health.jsonl").read_text().splitlines()[0])
    assert line["layers"]["blocks.1.attn.gate"]["saturated"] == [1.0, 0.0, 0.0]
    assert line["collapsed"] == []


def test_the_watchdog_dumps_the_stacks_while_native_code_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa.trace.stall.watchdog.GRACE_S", 0.1)
    watchdog = Watchdog(tmp_path, 0, 0.2, Board(), list)
    watchdog.feed()
    ctypes.PyDLL(None).usleep(1_500_000)  # which keeps the GIL
    seen = watchdog.path.read_text()
    watchdog.close()
    assert re.match(r"Timeout \(0:00:00\.3\d*\)!\nThread 0x", seen)
    assert "in test_the_watchdog_dumps_the_stacks_while_native_code_holds_the_lock" in seen


HANGS = """
import threading
from pathlib import Path
import torch
from nsa.trace.stall.watchdog import Watchdog

lock, watchdogs, feed = threading.Lock(), [], Watchdog.feed
lock.acquire()

def fed(self):
    watchdogs.append(self)
    feed(self)

Watchdog.feed = fed

class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        feed(watchdogs[-1])  # a busy machine may have taken long to come here
        Path("here").touch()
        with lock: return gradient
"""


def test_a_stalled_training_that_is_aborted_leaves_stacks_missing_parameters_and_memory(
    warm: WarmPython, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "train.py").write_text(
        HANGS + planted("model.blocks[6].register_forward_hook(lambda module, inputs, output: Wait.apply(output))")
    )
    arguments = ["--config", str(TINY), "--steps", "2", "--set", "train.watchdog_s=1", "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = warm.popen(str(tmp_path / "train.py"), *arguments, cwd=tmp_path, **pipes)
    here, stall = tmp_path / "here", out / "mem_stall_rank0.txt"
    while not (here.exists() and stall.exists() and stall.stat().st_mtime_ns > here.stat().st_mtime_ns):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGABRT)
    process.communicate()
    assert process.returncode == -signal.SIGABRT
    fatal = (out / "rank0" / "fatal.txt").read_text()
    assert fatal.startswith("Fatal Python error: Aborted\n")
    assert "train.py" in fatal
    assert "in backward" in fatal
    traces = (out / "traces.log").read_text().rpartition("[GRAD-TRACE] in_backward_step1 ")[2]
    names = re.findall(r"^  - MISSING: (\S+)$", traces, re.M)
    assert traces.startswith(f"arrived={195 - len(names)} missing={len(names)}\n")
    assert "blocks.6.mlp.fc2.weight" in names
    assert "blocks.7.mlp.fc2.weight" not in names
    listed = (out / "all_missing_params.txt").read_text().splitlines()
    assert listed[-len(names) :] == [f"step1 {name} rank=0" for name in names]
    for moment in ("boot", "stall"):
        assert json.loads((out / f"mem_{moment}_rank0.json").read_text())["rss_mib"] > 50
    beats = [json.loads(line) for line in (out / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert {beat["pid"] for beat in beats} == {process.pid}
    assert beats[-1]["rss_mib"] > 50
    assert beats[-1]["cuda_reserved_mib"] is None
    assert command(["diagnose", str(out)]) == 1
    assert "in backward" in capsys.readouterr().out


def test_a_line_that_was_torn_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    metrics = Metrics(tmp_path, load_config(TINY))
    metrics.add(StepResult(step=2, loss=4.0, lr=1e-3, tokens=10, seconds=0.5, peak_mib=1.0))
    metrics.close()
    first, torn, again = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (json.loads(first)["step"], torn, json.loads(again)["loss"]) == (1, '{"step": 2, "lo', 4.0)
