"""Rows of the plan as sets of factors: properties that a failure may need, read from what a row sets, never from its name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nsa.config import SAFE, load_config
from tests_cpu.plan.scenarios import CPU, GPU, ROOT, TABLE, settings_of

Facts = Mapping[str, Any]
BACKEND = "backend"  # of the run's ranks, as their verdicts have it
# Safe mode follows from what it sets, the rates from the dtype, the backend from the ranks, the second of two variables of a row
# from the first.
FOLLOWS = {"parallel.safe", "parallel.backend", "train.lr", "train.min_lr", "env.TORCH_NCCL_BLOCKING_WAIT"}
SHOWS_MORE = ("_DEBUG", "_STACKTRACES")  # variables that change output alone


@dataclass(frozen=True, kw_only=True, eq=False)
class Factor:
    """A property that a row has or lacks. ``fields`` are what ``has`` reads: a row that differs in these alone is its control.

    ``exit`` is what a fault that needs it leads to in the drawn tree, ``action`` what is then to do: {where} is the place, {stage}
    how far the rows get, {name} the factor. Without an action the cause's advice is given. ``is_general``: where a narrower factor
    may be needed as well, this one may be named in its place.
    """

    name: str
    fields: tuple[str, ...]
    has: Callable[[Facts], bool]
    exit: str = ""
    action: str = ""
    is_general: bool = True


@functools.cache
def facts_by_name(is_real: bool) -> dict[str, Facts]:
    """Return each row's facts at a size, by its scenario's name: every field of the configuration that rows differ in, and more."""
    size = GPU if is_real else CPU
    sections = asdict(load_config(ROOT / "configs" / size.config))
    base = {f"{s}.{key}": v for s, values in sections.items() if isinstance(values, dict) for key, v in values.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in TABLE:
        facts = base | settings_of(row, size) | {"uses": row.uses, "check": row.check}
        if facts["parallel.safe"]:
            facts |= {f"{section}.{key}": v for section, values in SAFE.items() for key, v in values.items()}
        facts |= {f"env.{name}": v for name, v in row.environment.items() if not any(m in name for m in SHOWS_MORE)}
        found[size.name_of(row)] = facts
    names = {name for facts in found.values() for name in facts}
    values = {n: [f.get(n, "") for f in found.values()] for n in names}
    differ = {n for n, seen in values.items() if any(v != seen[0] for v in seen)} - FOLLOWS
    gloo = {size.name_of(row) for row in TABLE if "parallel.backend" in row.overrides}
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
    layers = set(range(first, last))
    name, exit_ = f"checkpointing of layers {first} to {last - 1}", "yes: gradient checkpointing, of these layers"
    some, alone = (
        f"{LOOK}, layers {first} to {last - 1}: {FORMS}",
        f"{LOOK} of layers {first} to {last - 1} alone: {FORMS}",
    )
    return (
        Factor(name=name, fields=CHECKPOINTING, has=lambda f: bool(layers & set(_checkpointed(f))), exit=exit_, action=some),
        Factor(name=f"{name} alone", fields=CHECKPOINTING, has=lambda f: set(_checkpointed(f)) == layers, exit=exit_, action=alone),
    )  # fmt: skip


def _branch(name: str) -> Factor:
    return Factor(
        name=f"branch {name}", fields=("model.force_branch", "model.attention"),
        has=lambda f: _is_nsa(f) and f["model.force_branch"] in (None, name), exit="yes: fix that branch",
        action=f"fix the {{stage}} of branch {name}{{where}}", is_general=False,
    )  # fmt: skip


def _mode(name: str, word: str, action: str) -> Factor:
    return Factor(
        name=word,
        fields=("parallel.mode",),
        has=lambda f: f["parallel.mode"] == name,
        exit=f"yes: {word}",
        action=action,
    )


def _is_nsa(f: Facts) -> bool:
    return bool(f["model.attention"] == "nsa")


def _is_ddp(f: Facts) -> bool:
    return bool(f["parallel.mode"] == "ddp")


def _has_ranks(f: Facts) -> bool:
    return bool(f["parallel.mode"] != "none")


CHECKPOINTING = ("train.gradient_checkpointing", "train.gc_range", "model.n_layers", "uses")
GATES = ("model.force_branch", "model.attention", "model.stop_gate_gradient")
FORMS = "reentrant or not, boundaries, in-place writes in a checkpointed region{where}"
WHAT_CHANGES = "look at what {name} changes{where}: rows without it pass"
LOOK = "look at gradient checkpointing"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of the seeds' tree: the factors that answer it, and the hypothesis behind it."""

    text: str
    hypothesis: str
    factors: tuple[Factor, ...]


# In the order in which the seeds ask; of the factors that a fault needs the first names the action.
QUESTIONS = (
    Question(
        text="does it need gradient checkpointing?", hypothesis="checkpointing and the custom backward do not go together",
        factors=(
            Factor(name="checkpointing", fields=CHECKPOINTING, has=lambda f: bool(_checkpointed(f)),
                   exit="yes: gradient checkpointing", action=f"{LOOK}: {FORMS}"),
            *_half(0, 6), *_half(6, 12),
            Factor(name="checkpointing of all layers at once", fields=CHECKPOINTING, exit="yes: gradient checkpointing",
                   has=lambda f: len(_checkpointed(f)) == f["model.n_layers"], action=f"{LOOK} of all layers at once: {FORMS}"),
            Factor(name="non-reentrant checkpointing", fields=("train.gc_reentrant",), has=lambda f: not f["train.gc_reentrant"],
                   exit="yes: its other form", action=f"{LOOK}: its reentrant form passes{{where}}"),
            Factor(name="reentrant checkpointing", fields=("train.gc_reentrant",), has=lambda f: bool(f["train.gc_reentrant"]),
                   exit="yes: its reentrant form", action=f"{LOOK}: set train.gc_reentrant: false{{where}}"),
        ),
    ),
    Question(
        text="does a static graph pass where plain DDP fails?", hypothesis="the graph changes from step to step",
        factors=(
            Factor(name="plain DDP", fields=("parallel.mode", "parallel.static_graph"),
                   has=lambda f: _is_ddp(f) and not f["parallel.static_graph"], exit="yes: enable static_graph in production",
                   action="enable static_graph in production (NSA_DDP_STATIC_GRAPH=1); it requires that every step touches "
                   "every parameter"),
        ),
    ),
    Question(
        text="does one branch alone fail?", hypothesis="one branch's own backward does not signal its gradients",
        factors=tuple(_branch(name) for name in ("cmp", "sel", "win")),
    ),
    Question(
        text="do all branches together fail, where each alone passes?", hypothesis="the branches depend on each other",
        factors=(
            Factor(name="the gates' gradient", fields=GATES, exit="yes: the gates",
                   has=lambda f: _is_nsa(f) and not f["model.force_branch"] and not f["model.stop_gate_gradient"],
                   action="look at the gates: each branch alone passes, all together fail{where}"),
            Factor(name="all branches at once", fields=GATES[:2], has=lambda f: _is_nsa(f) and not f["model.force_branch"],
                   exit="yes: what needs all of them",
                   action="look at what needs all branches at once (the gates, their sum, the fused operator): each alone passes"
                   "{where}"),
        ),
    ),
    Question(
        text="does plain attention pass?", hypothesis="NSA's own attention fails",
        factors=(
            Factor(name="NSA", fields=("model.attention",), has=_is_nsa, exit="yes: NSA's own attention",
                   action="look at NSA's own {stage}{where}: the same model with plain attention passes"),
            Factor(name="plain attention", fields=("model.attention",), has=lambda f: not _is_nsa(f), exit="it alone fails",
                   action="look at plain attention, the control itself{where}: NSA passes"),
        ),
    ),
    Question(
        text="does it pass with torch's math kernels?", hypothesis="a fused kernel fails",
        factors=(
            Factor(name="fused kernels", fields=("model.backend",), has=lambda f: f["model.backend"] != "math",
                   exit="yes: the kernels", action="look at the fused kernels{where}; until then set model.backend: math"),
        ),
    ),
    Question(
        text="does gloo pass where NCCL fails?", hypothesis="NCCL's transport stalls",
        factors=(
            Factor(name="NCCL", fields=(BACKEND,), has=lambda f: _has_ranks(f) and f[BACKEND] == "nccl",
                   exit="yes: NCCL's transport", action="look at NCCL's transport: the same step passes on gloo"),
            Factor(name="NCCL between GPUs (P2P)", fields=(BACKEND, "env.NCCL_P2P_DISABLE"), exit="yes, without P2P: the link",
                   has=lambda f: _has_ranks(f) and f[BACKEND] == "nccl" and not f["env.NCCL_P2P_DISABLE"],
                   action="look at the link between the GPUs: the same step passes with NCCL_P2P_DISABLE=1"),
        ),
    ),
    Question(
        text="does it pass where DDP looks for unused parameters?", hypothesis="DDP waits for parameters that a step leaves unused",
        factors=(
            Factor(name="no search for unused parameters", fields=("parallel.find_unused_parameters",), exit="yes: find them",
                   has=lambda f: not f["parallel.find_unused_parameters"],
                   action="find the parameter that a step leaves unused; until then set parallel.find_unused_parameters: true"),
        ),
    ),
    Question(
        text="do ranks that share gradients otherwise pass?", hypothesis="DDP's reducer loses gradients",
        factors=(
            _mode("ddp", "DDP", "in production move to FSDP (--parallel fsdp), which passes: DDP's reducer is at fault{where}"),
            _mode("fsdp", "FSDP", "look at FSDP{where}: DDP passes"),
            _mode("average", "averaging by hand", "look at the averaging by hand{where}: DDP passes"),
        ),
    ),
    Question(
        text="does one process pass?", hypothesis="ranks wait for each other",
        factors=(
            Factor(name="several ranks", fields=("parallel.mode",), has=_has_ranks, exit="yes: what ranks do together"),
            _mode("none", "one process", "look at what one process does and ranks do not{where}"),
        ),
    ),
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
        Factor(name=text, fields=fields, has=lambda f, test=test: test(read(f)), exit="yes: what the row changes",
               action=WHAT_CHANGES)
        for text, test in tests.items()
    ]  # fmt: skip
