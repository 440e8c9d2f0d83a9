"""What the always-on tracers cost a step of a small model, in microseconds: by number of modules, under DDP, per collective.

    python benchmarks/step_cost.py --json benchmarks/results/step_cost.json

The model has N linear layers of 8 x 8. Traced and bare steps take turns in one process; the cost is the median difference of
neighbours. The first 100 changes of phase, each of which writes a line, are not counted. `light` is NSA_TRACE_LEVEL=light.

The recording of control flow, as in a second run: a step of the model under DDP, a step of configs/tiny_cpu.yaml, and Python alone,
with the recording and without it in turn; the ratio is the median of the pairs.
"""

import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from figures import keep, parser_of
from torch.nn.parallel import DistributedDataParallel

WARM, PAIRS, FLOW_PAIRS = 50, 400, 9
CASES: tuple[dict[str, Any], ...] = (
    {"modules": 1, "ddp": False, "light": False},
    {"modules": 13, "ddp": False, "light": False},
    {"modules": 52, "ddp": False, "light": False},
    {"modules": 13, "ddp": True, "light": False},
    {"modules": 13, "ddp": True, "light": True},
    # Nine linear layers of 256 and eight ReLU, a batch of 64, two ranks: a small but real step.
    {"modules": 17, "ddp": True, "light": False, "width": 256, "ranks": 2},
    {"modules": 17, "ddp": True, "light": True, "width": 256, "ranks": 2},
    {"collective": True},
    {"flow": True},
)


def step_cost(modules: int, *, ddp: bool, width: int = 8) -> dict[str, float]:
    """Return the microseconds that tracing adds to a step, and a bare step's."""
    from nsa.trace.session import installed

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layers = [
            torch.nn.Linear(width, width) if width == 8 or i % 2 == 0 else torch.nn.ReLU() for i in range(modules)
        ]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        model = DistributedDataParallel(model) if ddp else model
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    bare, untraced = (torch.nn.Module.__call__, torch.autograd.backward), make()
    x = torch.randn(64 if width > 8 else 4, width)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
        began = time.thread_time()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return time.thread_time() - began

    with tempfile.TemporaryDirectory() as folder:
        session = installed()
        session.begin(folder, 0, 1)
        models = make(), untraced
        traced = torch.nn.Module.__call__, torch.autograd.backward
        gc.collect()
        gc.freeze()
        added, alone = [], []
        for number in range(WARM + PAIRS):
            pair = {}
            for which in (0, 1) if number % 2 else (1, 0):
                torch.nn.Module.__call__, torch.autograd.backward = traced if which == 0 else bare
                pair[which] = step(*models[which])
            if number >= WARM:
                added.append(pair[0] - pair[1])
                alone.append(pair[1])
        session.end()
    return {"added_us": 1e6 * statistics.median(added), "step_us": 1e6 * statistics.median(alone)}


def collective_cost() -> dict[str, float]:
    """Return the microseconds that tracing adds to an all_reduce of one number in a group of one rank, and a bare one's; and what
    it adds to a broadcast that C++ starts, where torch has the hooks that record it.
    """
    from nsa.trace.session import installed

    value, group = [torch.ones(1)], dist.distributed_c10d._get_default_group()
    calls: dict[str, Callable[[], object]] = {"all_reduce": lambda: dist.all_reduce(value[0])}
    if hasattr(group, "register_post_hook"):
        in_cpp = torch._C._distributed_c10d._broadcast_coalesced
        calls["in_cpp"] = lambda: in_cpp(group, value, 1 << 20, 0)

    def median_us(call: Callable[[], object]) -> float:
        found = []
        for _ in range(2000):
            began = time.thread_time()
            call()
            found.append(time.thread_time() - began)
        return 1e6 * statistics.median(found[200:])

    alone = {name: median_us(call) for name, call in calls.items()}
    with tempfile.TemporaryDirectory() as folder:
        session = installed()
        session.begin(folder, 0, 1)
        added = {name: median_us(call) - alone[name] for name, call in calls.items()}
        session.end()
    found = {"added_us": added["all_reduce"], "all_reduce_us": alone["all_reduce"]}
    return found if len(calls) == 1 else {**found, "added_in_cpp_us": added["in_cpp"], "in_cpp_us": alone["in_cpp"]}


def ddp_steps() -> Callable[[], None]:
    """Return a function that runs 20 steps of a model of 12 layers under DDP."""
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()

    return run


def training_step() -> Callable[[], None]:
    """Return a function that runs a step of the smallest transformer."""
    import nsa

    config = nsa.load_config(Path(__file__).resolve().parents[1] / "configs" / "tiny_cpu.yaml")
    model = nsa.build_model(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.model.vocab_size, (1, 257))

    def run() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return run


def python_alone() -> None:
    """Count words, as code that prepares data does."""
    counts: dict[str, int] = {}
    for number in range(60_000):
        word = str(number % 997)
        if len(word) > 1:
            counts[word] = counts.get(word, 0) + 1


def flow_cost() -> dict[str, float]:
    """Return by how many times the recording of control flow lengthens each workload."""
    from nsa.trace.flow.recorder import FlowRecorder
    from nsa.trace.session import installed

    session, ratios = installed(), {}
    for name, run in {"ddp_step": ddp_steps(), "tiny_cpu_step": training_step(), "python_alone": python_alone}.items():
        run()
        found = []
        for number in range(FLOW_PAIRS):
            began = time.perf_counter()
            run()
            bare = time.perf_counter() - began
            with tempfile.TemporaryDirectory() as folder:
                recorder = FlowRecorder(Path(folder) / f"{number}.bin")
                session.recorder.on_call = recorder.call
                recorder.start()
                began = time.perf_counter()
                run()
                found.append((time.perf_counter() - began) / bare)
                recorder.stop()
            session.recorder.on_call = None
        ratios[name] = statistics.median(found)
    return ratios


def measure(case: dict[str, Any], rank: int, store: str) -> dict[str, float]:
    """Measure a case as one of its ranks, in a process that starts anew."""
    torch.set_num_threads(1)
    ranks = case.get("ranks", 1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if "modules" in case:
        return step_cost(case["modules"], ddp=case["ddp"], width=case.get("width", 8))
    return flow_cost() if "flow" in case else collective_cost()


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    found = []
    for case in CASES:
        os.environ["NSA_TRACE_LEVEL"] = "light" if case.get("light") else "full"
        ranks = range(case.get("ranks", 1))
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(len(ranks)) as pool:
            of_ranks = pool.starmap(measure, [(case, rank, f"{folder}/store") for rank in ranks], chunksize=1)
        found.append({**case, **of_ranks[0]})
    keep({"cases": found, "pairs": PAIRS}, arguments.json)


if __name__ == "__main__":
    main()
