"""Rows of the plan as sets of factors: properties that a failure may need, read from what a row sets, never from its name."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from nsa.config import SAFE, VARIABLES, load_config
from tests_cpu.plan.scenarios import CPU, GPU, ROOT, TABLE, read_settings

Facts = Mapping[str, Any]
BACKEND = "backend"  # of the run's ranks, as their verdicts have it
# Safe mode follows from what it sets, the rates from the dtype, the backend from the ranks, the second of two variables of a row
# from the first.
FOLLOWS = {"parallel.safe", "parallel.backend", "train.lr", "train.min_lr", "env.TORCH_NCCL_BLOCKING_WAIT"}
SHOWS_MORE = ("_DEBUG", "_STACKTRACES")  # variables that change output alone


class Factor(NamedTuple):
    """A property that a row has or lacks. ``fields`` are what ``has`` reads: a row that differs in these alone is its control.

    ``exit`` is what a fault that needs it leads to in the drawn tree, ``action`` what is then to do: {where} is the place, {stage}
    how far the rows get, {name} the factor. Without an action the cause's advice is given. ``is_general``: where a narrower factor
    may be needed as well, this one may be named in its place.
    """

    name: str
    fields: tuple[str, ...]
    has: Callable[[Facts], bool]
    exit: str
    action: str = ""
    is_general: bool = True


class Question(NamedTuple):
    """A question of the seeds' tree, the hypothesis behind it, and the factors that answer it."""

    text: str
    hypothesis: str
    factors: tuple[Factor, ...]


@functools.cache
def facts_by_name(is_real: bool) -> dict[str, Facts]:
    """Return each row's facts at a size, by its scenario's name: every field of the configuration that rows differ in, and more."""
    size = GPU if is_real else CPU
    exported = {
        name: os.environ.pop(name) for name in VARIABLES if name in os.environ
    }  # a row decides, as in `running`
    try:
        sections = asdict(load_config(ROOT / "configs" / size.config))
    finally:
        os.environ.update(exported)
    base = {f"{s}.{key}": v for s, values in sections.items() if isinstance(values, dict) for key, v in values.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in TABLE:
        facts = base | read_settings(row, size) | {"uses": row.uses, "check": row.check}
        if facts["parallel.safe"]:
            facts |= {f"{section}.{key}": v for section, values in SAFE.items() for key, v in values.items()}
        facts |= {f"env.{name}": v for name, v in row.environment.items() if not any(m in name for m in SHOWS_MORE)}
        found[size.find_name(row)] = facts
    names = {name for facts in found.values() for name in facts}
    values = {n: [f.get(n, "") for f in found.values()] for n in names}
    differ = {n for n, seen in values.items() if any(v != seen[0] for v in seen)} - FOLLOWS
    gloo = {size.find_name(row) for row in TABLE if "parallel.backend" in row.overrides}
    return {
        name: {n: facts.get(n, "") for n in sorted(differ)} | {BACKEND: "gloo" if name in gloo else ""}
        for name, facts in found.items()
    }


def _checkpointed(f: Facts) -> range:
    """Return the layers that recompute."""
    if not f["train.gradient_checkpointing"]:
        return range(0)
    first, _, last = (f["train.gc_range"] or f"0:{f['model.n_layers']}").partition(":")
    return range(int(first), min(int(last), f["model.n_layers"]))


def _half(first: int, last: int) -> tuple[Factor, Factor]:
    """Return what recomputes some of these layers, and what recomputes them and no others."""
    layers, those = set(range(first, last)), f"layers {first} to {last - 1}"
    name, exit_ = f"checkpointing of {those}", "yes: gradient checkpointing, of these layers"
    return (
        Factor(name, GC, lambda f: bool(layers & set(_checkpointed(f))), exit_, f"{LOOK}, {those}: {FORMS}"),
        Factor(
            f"{name} alone", GC, lambda f: set(_checkpointed(f)) == layers, exit_, f"{LOOK} of {those} alone: {FORMS}"
        ),
    )


def _branch(name: str) -> Factor:
    def has(f: Facts) -> bool:
        return _is_nsa(f) and f["model.force_branch"] in (None, name)

    return Factor(
        f"branch {name}", GATES[:2], has, "yes: fix that branch", f"fix the {{stage}} of branch {name}{{where}}", False
    )


def _mode(name: str, word: str, action: str) -> Factor:
    return Factor(word, MODE, _is("parallel.mode", name), f"yes: {word}", action)


def _is(field: str, value: str) -> Callable[[Facts], bool]:
    return lambda f: bool(f[field] == value)


def _has_ranks(f: Facts) -> bool:
    return not _is_alone(f)


_is_nsa, _is_ddp, _is_alone = _is("model.attention", "nsa"), _is("parallel.mode", "ddp"), _is("parallel.mode", "none")
MODE = ("parallel.mode",)
GC = ("train.gradient_checkpointing", "train.gc_range", "model.n_layers", "uses")
REENTRANT = ("train.gc_reentrant",)
GATES = ("model.force_branch", "model.attention", "model.stop_gate_gradient")
FORMS = "reentrant or not, boundaries, in-place writes in a checkpointed region{where}"
WHAT_CHANGES = "look at what {name} changes{where}: rows without it pass"
LOOK = "look at gradient checkpointing"

# In the order in which the seeds ask; of the factors that a fault needs the first names the action.
QUESTIONS = (
    Question("does it need gradient checkpointing?", "checkpointing and the custom backward do not go together", (
        Factor("checkpointing", GC, lambda f: bool(_checkpointed(f)), "yes: gradient checkpointing", f"{LOOK}: {FORMS}"),
        *_half(0, 6), *_half(6, 12),
        Factor("checkpointing of all layers at once", GC, lambda f: len(_checkpointed(f)) == f["model.n_layers"],
               "yes: gradient checkpointing", f"{LOOK} of all layers at once: {FORMS}"),
        Factor("non-reentrant checkpointing", REENTRANT, lambda f: not f["train.gc_reentrant"],
               "yes: its other form", f"{LOOK}: its reentrant form passes{{where}}"),
        Factor("reentrant checkpointing", REENTRANT, lambda f: bool(f["train.gc_reentrant"]),
               "yes: its reentrant form", f"{LOOK}: set train.gc_reentrant: false{{where}}"),
    )),
    Question("does a static graph pass where plain DDP fails?", "the graph changes from step to step", (
        Factor("plain DDP", ("parallel.mode", "parallel.static_graph"), lambda f: _is_ddp(f) and not f["parallel.static_graph"],
               "yes: enable static_graph in production",
               "enable static_graph in production (NSA_DDP_STATIC_GRAPH=1); it requires that every step touches every parameter"),
    )),
    Question("does one branch alone fail?", "one branch's own backward does not signal its gradients",
             tuple(_branch(name) for name in ("cmp", "sel", "win"))),
    Question("do all branches together fail, where each alone passes?", "the branches depend on each other", (
        Factor("the gates' gradient", GATES,
               lambda f: _is_nsa(f) and not f["model.force_branch"] and not f["model.stop_gate_gradient"],
               "yes: the gates", "look at the gates: each branch alone passes, all together fail{where}"),
        Factor("all branches at once", GATES[:2], lambda f: _is_nsa(f) and not f["model.force_branch"],
               "yes: what needs all of them",
               "look at what needs all branches at once (the gates, their sum, the fused operator): each alone passes{where}"),
    )),
    Question("does plain attention pass?", "NSA's own attention fails", (
        Factor("NSA", GATES[1:2], _is_nsa, "yes: NSA's own attention",
               "look at NSA's own {stage}{where}: the same model with plain attention passes"),
        Factor("plain attention", GATES[1:2], lambda f: not _is_nsa(f), "it alone fails",
               "look at plain attention, the control itself{where}: NSA passes"),
    )),
    Question("does it pass with torch's math kernels?", "a fused kernel fails", (
        Factor("fused kernels", ("model.backend",), lambda f: not _is("model.backend", "math")(f), "yes: the kernels",
               "look at the fused kernels{where}; until then set model.backend: math"),
    )),
    Question("does gloo pass where NCCL fails?", "NCCL's transport stalls", (
        Factor("NCCL", (BACKEND,), lambda f: _has_ranks(f) and f[BACKEND] == "nccl", "yes: NCCL's transport",
               "look at NCCL's transport: the same step passes on gloo"),
        Factor("NCCL between GPUs (P2P)", (BACKEND, "env.NCCL_P2P_DISABLE"),
               lambda f: _has_ranks(f) and f[BACKEND] == "nccl" and not f["env.NCCL_P2P_DISABLE"], "yes, without P2P: the link",
               "look at the link between the GPUs: the same step passes with NCCL_P2P_DISABLE=1"),
    )),
    Question("does it pass where DDP looks for unused parameters?", "DDP waits for parameters that a step leaves unused", (
        Factor("no search for unused parameters", ("parallel.find_unused_parameters",),
               lambda f: not f["parallel.find_unused_parameters"], "yes: find them",
               "find the parameter that a step leaves unused; until then set parallel.find_unused_parameters: true"),
    )),
    Question("do ranks that share gradients otherwise pass?", "DDP's reducer loses gradients", (
        _mode("ddp", "DDP", "in production move to FSDP (--parallel fsdp), which passes: DDP's reducer is at fault{where}"),
        _mode("fsdp", "FSDP", "look at FSDP{where}: DDP passes"),
        _mode("average", "averaging by hand", "look at the averaging by hand{where}: DDP passes"),
    )),
    Question("does one process pass?", "ranks wait for each other", (
        Factor("several ranks", MODE, _has_ranks, "yes: what ranks do together"),
        _mode("none", "one process", "look at what one process does and ranks do not{where}"),
    )),
)  # fmt: skip


# Fields of which the questions have a factor for every value, and those of which they have none.
WHOLE = {"parallel.mode", "model.attention", "model.force_branch", "train.gc_range", "train.gc_reentrant", BACKEND}
SIZES = {"uses", "model.n_layers"}


def _depth(f: Facts) -> int:
    """Return how many blocks there are: one, used again, takes the place of all."""
    return int(f["uses"] if f["uses"] > 1 else f["model.n_layers"])


@functools.cache
def factors(is_real: bool) -> tuple[Factor, ...]:
    """Return all factors in order: those of the questions, then one per value of each other field that rows differ in."""
    found = [factor for question in QUESTIONS for factor in question.factors]
    read = {name for factor in found for name in factor.fields}
    rows = facts_by_name(is_real).values()
    for name in sorted({n for f in rows for n in f} - WHOLE):
        values = [f[name] for f in rows]
        usual = max(values, key=values.count)  # of a field that questions read: they have a factor for it
        kept = [v for v in values if name not in read or name in SIZES or v != usual]
        found += _of_values(name, (name,), lambda f, name=name: f[name], kept)
    return (*found, *_of_values("blocks", ("model.n_layers", "uses"), _depth, [_depth(f) for f in rows]))


def _of_values(name: str, fields: tuple[str, ...], read: Callable[[Facts], Any], values: list[Any]) -> list[Factor]:
    """Return a factor per value: where these are numbers per bound, at least it and below it."""
    seen = list(dict.fromkeys(values))
    tests: dict[str, Callable[[Any], bool]] = {}
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in seen):
        for low, high in itertools.pairwise(sorted(seen)):
            tests |= {f"{name} >= {high}": lambda v, n=high: v >= n, f"{name} <= {low}": lambda v, n=low: v <= n}
    else:
        values_named = [value for value in seen if value != "" or name != "check"]
        tests = {f"{name} = {v if v != '' else 'none'}": lambda v, w=v: v == w for v in values_named}
    return [
        Factor(text, fields, lambda f, test=test: test(read(f)), "yes: what the row changes", WHAT_CHANGES)
        for text, test in tests.items()
    ]
