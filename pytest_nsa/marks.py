"""The marks: what each takes, what it does, and its message for a wrong argument.

Each function below is the mark as a plain decorator; its docstring is its line in ``pytest --markers``.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.host_fixtures import made_in_ranks
from pytest_nsa.marked import (
    DEFAULT_WORLD_SIZE,
    RANK_FIXTURES,
    SIZE,
    OurMark,
    counts,
    get_memory,
    get_size,
    get_sizes,
    is_ranked,
    makes_its_own_group,
    takes,
)
from pytest_nsa.wire.messages import FIXED_VARIABLES

BRANCHES = ("cmp", "sel", "win")
BACKENDS = ("gloo", "nccl")
TRACES = ("grads", "module_bwd", "ddp_buckets")
# A process per rank: 64 anywhere, more where there are cores and memory for them.
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
_MEMORY_PER_RANK = 200 << 20  # bytes
MAX_WORLD_SIZE = max(64, min(4096, 16 * (os.cpu_count() or 1), _MEMORY // _MEMORY_PER_RANK))


class LayerRange(str):
    """Layers start <= i < end, as text ('0:6') and numbers. Raises ValueError with the right form.

    ``may_be_empty``: as in '0:0', with which a bisection runs a test without any layer.
    """

    start: int
    end: int

    def __new__(cls, text: str, *, may_be_empty: bool = False) -> LayerRange:
        first, colon, last = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not (colon and first.isdecimal() and last.isdecimal()):
            raise ValueError("must be 'start:end' in whole layers, as in '0:6' (layers 0 to 5)")
        if int(first) >= int(last) and not (may_be_empty and int(first) == int(last)):
            raise ValueError(f"the range must go up, as in '0:6' (layers 0 to 5); got start {first}, end {last}")
        self = super().__new__(cls, text)
        self.start, self.end = int(first), int(last)
        return self


class _Decorator(pytest.MarkDecorator):
    """A mark of this package, which counts on any test; a mark of the same name made by `pytest.mark` counts on ranks alone."""

    def with_args(self, *args: object, **kwargs: object) -> pytest.MarkDecorator:
        """Return the decorator with arguments, as the base does."""
        return _made(self.name, *self.args, *args, **{**self.kwargs, **kwargs})

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Mark a function or class, as the base does.

        The mark world_size also requests a fixture of the plugin: without the plugin the test would pass on no ranks.
        """
        marked = super().__call__(*args, **kwargs)
        is_applied = bool(args) and marked is args[0] and self.name == "world_size"
        return pytest.mark.usefixtures("pytest_nsa_plugin")(marked) if is_applied else marked


def _made(name: str, *args: object, **kwargs: object) -> pytest.MarkDecorator:
    """Return a mark of this package."""
    return _Decorator(OurMark(name, args, kwargs, _ispytest=True), _ispytest=True)


def world_size(*n: int, group: str | None = "made") -> pytest.MarkDecorator:
    """Run the test's body on n ranks, each a fresh process in one process group; several numbers make a test each.

    At most 64 ranks, or 16 per core where there is memory for them. A test that takes `group`, `ddp` or `fsdp` without this mark
    runs on 2. With ``group=None`` they are in no group: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and the test makes
    the group.
    """
    return _made("world_size", *n) if group == "made" else _made("world_size", *n, group=group)


def backend(name: str) -> pytest.MarkDecorator:
    """The process group's backend, 'gloo' or 'nccl' (default: gloo on CPU; nccl where each rank has its own GPU)."""
    return _made("backend", name)


def branch(*names: str) -> pytest.MarkDecorator:
    """The value of the fixture `branch`: 'cmp', 'sel' or 'win'; several names parametrize the test."""
    return _made("branch", *names)


def gc_range(*ranges: str) -> pytest.MarkDecorator:
    """The value of the fixture `gc_range`: layers that checkpoint, 'start:end', half open; several parametrize the test."""
    return _made("gc_range", *ranges)


def trace_kinds(*kinds: str) -> pytest.MarkDecorator:
    """What the fixture `trace` records and prints: any of 'grads', 'module_bwd', 'ddp_buckets' (default: all)."""
    return _made("trace_kinds", *kinds)


def trace(*kinds: str) -> pytest.MarkDecorator:
    """An older name of trace_kinds; the fixture `trace` has the same name."""
    return _made("trace", *kinds)


def scenario(name: str, *, reads_as: str = "") -> pytest.MarkDecorator:
    """The row of the diagnostic plan that this test is: it names its folder and its line in SUMMARY.md.

    ``reads_as`` is what a failure means; it is printed with the verdict.
    """
    return _made("scenario", name, reads_as=reads_as) if reads_as else _made("scenario", name)


def fails_as(cause: str) -> pytest.MarkDecorator:
    """The test must fail, with this cause (docs/causes): that is an expected failure; passing, or another cause, fails it."""
    return _made("fails_as", cause)


def rerun(wanted: bool) -> pytest.MarkDecorator:
    """``rerun(False)``: a failure of the test is not run again, as its effects outside of its ranks must happen once."""
    return _made("rerun", wanted)


def rank_env(**variables: str) -> pytest.MarkDecorator:
    """Set variables of the ranks' environment, before the group forms or a GPU is used: ``rank_env(NCCL_P2P_DISABLE='1')``."""
    return _made("rank_env", **variables)


def cores(n: int) -> pytest.MarkDecorator:
    """Pin the test's ranks to n cores that no other test with this mark uses at the same time."""
    return _made("cores", n)


# Without arguments the mark is the decorator, so that it also serves as `pytestmark` and in `pytest.param(marks=...)`.
static_graph: pytest.MarkDecorator = _made("static_graph")
gpu: pytest.MarkDecorator = _made("gpu")
check_divergence: pytest.MarkDecorator = _made("check_divergence")
reuse: pytest.MarkDecorator = _made("reuse")
hash_seeds: pytest.MarkDecorator = _made("hash_seeds")


def _must(is_right: Callable[[pytest.Mark], bool], form: str) -> Callable[[pytest.Mark], str | None]:
    """Return the check of a mark that has to have a form where its arguments are not right."""
    return lambda mark: None if is_right(mark) else form


def _is_scenario(mark: pytest.Mark) -> bool:
    name, reads_as = (*mark.args, "")[0], mark.kwargs.get("reads_as", "")
    is_name = isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*", name) is not None
    return is_name and len(mark.args) == 1 and isinstance(reads_as, str) and not mark.kwargs.keys() - {"reads_as"}


def _check_mark_choice(
    mark: pytest.Mark, allowed: tuple[str, ...], example: str, *, single: bool = False
) -> str | None:
    if mark.kwargs or not mark.args or (single and len(mark.args) != 1):
        return f"takes {'one' if single else 'one or more'} of {', '.join(allowed)}, as in {example}"
    for value in mark.args:
        if value not in allowed:
            return f"{value!r} must be one of {', '.join(allowed)}, as in {example}"
    return None


def _check_world_size(mark: pytest.Mark) -> str | None:
    sizes = get_sizes(mark)
    if mark.kwargs not in ({}, {"group": None}):
        return "takes numbers of ranks and group=None, as in world_size(2) or world_size(2, group=None)"
    if not sizes or any(type(size) is not int for size in sizes):
        return "takes one whole number of ranks, as in world_size(2), or several, which make a test each"
    if not all(1 <= size <= MAX_WORLD_SIZE for size in sizes):
        return f"must be from 1 to {MAX_WORLD_SIZE} ranks, as in world_size(2)"
    return None


def _check_cores(mark: pytest.Mark) -> str | None:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # Linux alone
    if mark.kwargs or len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 1:
        return "takes one whole number of cores, 1 or more, as in cores(1)"
    return f"this machine lends {available} cores" if mark.args[0] > available else None


def _check_rank_env(mark: pytest.Mark) -> str | None:
    if mark.args or not mark.kwargs:
        return "takes variables by name, as in rank_env(NCCL_P2P_DISABLE='1')"
    for name, text in mark.kwargs.items():
        if not isinstance(text, str):
            return f"{name}={text!r}: must be text, as in rank_env({name}='{text}')"
        if name in FIXED_VARIABLES:
            return f"{name}: the plugin numbers the ranks and chooses their GPUs; leave it out"
    return None


def _check_gpu(mark: pytest.Mark) -> str | None:
    count, share = mark.kwargs.get("count"), mark.kwargs.get("share", False)
    if mark.args or set(mark.kwargs) - {"count", "share", "memory"} or not isinstance(share, bool):
        return "takes count=, a number of GPUs, share=, True or False, and memory=, as in gpu, gpu(count=2) or gpu(memory='8GiB')"
    if count is not None and (type(count) is not int or count < 1):
        return f"count={count!r} must be a whole number of GPUs, 1 or more, as in gpu(count=2)"
    if "memory" in mark.kwargs and get_memory(mark) is None:
        return f"memory={mark.kwargs['memory']!r} must be a whole number of MiB or GiB, as in gpu(memory='8GiB')"
    if "memory" in mark.kwargs and share:
        return "memory= and share= contradict each other: with memory= a test shares its GPU as far as all fit, so remove share="
    return None


def _check_gc_range(mark: pytest.Mark) -> str | None:
    if mark.kwargs or not mark.args:
        return "takes one or more ranges of layers, as in gc_range('0:6')"
    for value in mark.args:
        try:
            LayerRange(value)
        except ValueError as error:
            return str(error)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkRule:
    """A mark as ``--markers`` shows it, its check (None: fine), and the fixture without which it does nothing."""

    name: str
    form: str
    text: str
    check: Callable[[pytest.Mark], str | None]
    fixture: str | None = None

    def describe(self) -> str:
        """The line for ``pytest --markers``."""
        return f"{self.name}{self.form}: {self.text}"


def _taking_arguments(
    decorator: Callable[..., Any], check: Callable[[pytest.Mark], str | None], fixture: str | None = None
) -> MarkRule:
    """Return the rule of a mark that has a decorator above: form and text come from that function."""
    parameters = inspect.signature(decorator).parameters.values()
    shown = (str(p).split(":")[0] if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    form = f"({', '.join(shown)})"
    return MarkRule(
        name=decorator.__name__, form=form, text=inspect.getdoc(decorator) or "", check=check, fixture=fixture
    )


def _bare(name: str, text: str) -> MarkRule:
    check = _must(lambda m: not (m.args or m.kwargs), f"takes no argument, as in @pytest.mark.{name}")
    return MarkRule(name=name, form="", text=text, check=check)


_RULES = (
    _taking_arguments(world_size, _check_world_size),
    _taking_arguments(backend, lambda m: _check_mark_choice(m, BACKENDS, "backend('gloo')", single=True)),
    _taking_arguments(branch, lambda m: _check_mark_choice(m, BRANCHES, "branch('sel')"), fixture="branch"),
    _taking_arguments(gc_range, _check_gc_range, fixture="gc_range"),
    _bare("static_graph", "`ddp.wrap` makes DDP with static_graph=True."),
    _bare(
        "check_divergence",
        "Fail when ranks end with different gradients or parameters though DDP keeps them equal (three norms per tensor and step).",
    ),
    _taking_arguments(
        trace_kinds, lambda m: _check_mark_choice(m, TRACES, "trace_kinds('grads', 'module_bwd')"), fixture="trace"
    ),
    _taking_arguments(
        trace, lambda m: _check_mark_choice(m, TRACES, "trace_kinds('grads', 'module_bwd')"), fixture="trace"
    ),
    MarkRule(
        name="gpu",
        form="(count=None, share=False, memory=None)",
        text=(
            "The test needs GPUs: skipped with a reason where there are too few. No other test uses them while it runs, "
            "except with share=True on both. memory='8GiB': what all its ranks need together on each; tests that name it share "
            "a GPU as far as they fit. Default count: one per rank, or all that there are."
        ),
        check=_check_gpu,
    ),
    _taking_arguments(cores, _check_cores),
    MarkRule(
        name="hash_seeds",
        form="(*seeds)",
        text=(
            "Start each rank as a new interpreter with another hash seed (PYTHONHASHSEED), as torchrun's processes have. A bug "
            "that depends on the order of a set shows then: forked ranks all have one order. Without seeds they are drawn, and a "
            "failure prints them; hash_seeds(3, 14) gives rank 0 and rank 1 these. It costs the seconds of an import of torch."
        ),
        check=_must(
            lambda m: not m.kwargs and all(type(seed) is int and 0 <= seed < 1 << 32 for seed in m.args),
            "takes a whole number from 0 to 4294967295 for each rank, as in hash_seeds(3, 14), or none: they are drawn",
        ),
    ),
    _taking_arguments(
        rerun,
        _must(
            lambda m: not m.kwargs and len(m.args) == 1 and type(m.args[0]) is bool,
            "takes True or False, as in rerun(False)",
        ),
    ),
    _taking_arguments(rank_env, _check_rank_env),
    MarkRule(
        name="reuse",
        form="(group='kept')",
        text=(
            "On a class or module: its tests on ranks share their ranks and group, one after another; a failure ends these. "
            "group='fresh': they share their ranks, and each test has its own group."
        ),
        check=_must(
            lambda m: not m.args and m.kwargs in ({}, {"group": "kept"}, {"group": "fresh"}),
            "takes group='kept' or group='fresh', as in reuse or reuse(group='fresh')",
        ),
    ),
    _taking_arguments(
        scenario,
        _must(_is_scenario, "takes one name of letters, digits, '_', '-' and '.', as in scenario('ddp_static_graph')"),
    ),
    _taking_arguments(
        fails_as, lambda m: _check_mark_choice(m, tuple(CAUSES), "fails_as('lock_deadlock')", single=True)
    ),
)
RULES: dict[str, MarkRule] = {rule.name: rule for rule in _RULES}


def find_place(item: pytest.Item) -> tuple[str, int]:
    """Return the file in which a test is defined, and its line, from 1."""
    path, line, _ = item.reportinfo()
    return str(path), (line or 0) + 1


def named(item: pytest.Item) -> str:
    """Return 'file:line: name' of a test, as messages about it begin."""
    path, line = find_place(item)
    return f"{path}:{line}: {item.name}"


def wrong_marks(item: pytest.Item) -> Iterator[str]:
    """A sentence for each mark on ``item`` that cannot be used: file, line, the mark, and the right form."""
    where = named(item)
    fixtures = getattr(item, "fixturenames", ())
    own = {id(mark) for mark in getattr(getattr(item, "obj", None), "pytestmark", ())}
    for mark in item.iter_markers():
        rule = RULES.get(mark.name)
        if rule is None or not (counts(item, mark) or (rule.fixture and takes(item, rule.fixture))):
            continue
        shown = f"{mark.name}({', '.join([*map(repr, mark.args), *(f'{k}={v!r}' for k, v in mark.kwargs.items())])})"
        problem = rule.check(mark)
        if problem:
            yield f"{where}: {shown}: {problem}"
        elif rule.fixture and id(mark) in own and rule.fixture not in fixtures:
            yield f"{where}: {shown}: does nothing, as the test does not take the fixture '{rule.fixture}'; add it to its arguments"
    given = {mark.name for mark in item.iter_markers() if counts(item, mark)}
    if "fails_as" in given and not is_ranked(item):
        yield f"{where}: fails_as: does nothing, as the test does not run on ranks and gets no verdict; use pytest.mark.xfail"
    if any(node is item and counts(item, mark) for node, mark in item.iter_markers_with_node("reuse")):
        yield f"{where}: reuse: belongs on a class or a module (pytestmark = pytest.mark.reuse), whose tests then share their ranks"
    if "hash_seeds" in given:
        yield from _wrong_hash_seeds(item, where)
    if "static_graph" in given and "ddp" not in fixtures:
        yield f"{where}: static_graph: does nothing, as the test does not take the fixture 'ddp'; add it to its arguments"


def _wrong_hash_seeds(item: pytest.Item, where: str) -> Iterator[str]:
    given, size = item.get_closest_marker("hash_seeds").args, get_size(item, DEFAULT_WORLD_SIZE)  # type: ignore[union-attr]
    if not is_ranked(item):
        yield f"{where}: hash_seeds: does nothing, as the test does not run on ranks; set PYTHONHASHSEED for pytest"
    elif given and len(given) != size:
        yield f"{where}: hash_seeds: is for {len(given)} of {size} ranks: give a seed for each, or none"
    elif item.get_closest_marker("reuse"):
        yield f"{where}: hash_seeds: starts new ranks, and reuse keeps them: take one of the two off"


def rank_problems(item: pytest.Item) -> Iterator[str]:
    """A sentence for a test that requests ranks and cannot have them."""
    if not is_ranked(item):
        return
    where = named(item)
    if not isinstance(item, pytest.Function):
        yield f"{where}: doctests cannot run on ranks: write a test function, or a method of a class"
    elif makes_its_own_group(item) and any(takes(item, name) for name in RANK_FIXTURES):
        yield f"{where}: takes a fixture of the ranks' group, and world_size(..., group=None) makes none: remove one of the two"
    elif "launch" in made_in_ranks(item):
        yield (
            f"{where}: takes 'launch', which runs on the host, and runs on ranks itself: remove one of the two, or launch in a "
            "host_fixture"
        )


def other_plugin_warnings(item: pytest.Item) -> Iterator[str]:
    """Yield a warning for a test that requests ranks but that another plugin runs in this process: without ranks it would pass."""
    if is_ranked(item) and isinstance(item, pytest.Function):
        yield (
            f"{named(item)}: would not run on ranks: another plugin runs it ({type(item).__name__}); "
            "remove its mark, and call asyncio.run(...) in a plain function, or use pytest-asyncio's or anyio's"
        )


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one test per value in branch(), gc_range() or world_size()."""
    mark = metafunc.definition.get_closest_marker("world_size")
    sizes = get_sizes(mark) if mark is not None and _check_world_size(mark) is None else ()
    if len(sizes) > 1 and is_ranked(metafunc.definition):
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes, ids=[f"{size}-ranks" for size in sizes])
    for name in ("branch", "gc_range"):
        mark = metafunc.definition.get_closest_marker(name)
        if mark is not None and len(mark.args) > 1 and takes(metafunc.definition, name):
            metafunc.parametrize(name, mark.args, indirect=True)


def check_debug_rank(rank: int, items: Iterable[pytest.Item]) -> None:
    """Raise UsageError if none of the tests that are to run has the rank of ``--ranks-pdb-rank``."""
    sizes = [get_size(item, DEFAULT_WORLD_SIZE) for item in items if is_ranked(item)]
    sizes = [size for size in sizes if type(size) is int]  # other marks are refused
    if sizes and rank >= max(sizes):
        raise pytest.UsageError(
            f"--ranks-pdb-rank {rank}: no test has such a rank: the largest runs on {max(sizes)}, from 0 on"
        )
