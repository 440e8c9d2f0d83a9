"""The kernels in Gluon, on a simulated machine: against float64, with every order of what runs at the same time."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

import importance_overlapped
import launches
import selection_forward_tma
import simulated
import strided_dkv_overlapped
import strided_dq_overlapped
import strided_overlapped
from checks import assert_attends, assert_attends_to_picks, assert_finds_blocks, assert_gives_gradients

from nsa.kernels.triton import branches

SYNCHRONIZES = re.compile(r"\s+(mbarrier\.(wait|arrive|expect)\(|fence_async_shared\(\))")


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Run launched kernels on the simulated machine; the first number is the seed of what comes first."""
    found = [int(torch.randint(1 << 30, ()))]

    def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **settings: Any) -> None:
        del settings["num_warps"]
        simulated.run(kernel, grid, *arguments, seed=found[0], **settings)

    monkeypatch.setattr(launches, "launch", launch)
    yield found
    print(f"seed {found[0]}")


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "places", "bn", "stages"),
    [
        ([100], 8, 2, 32, 16, branches.window(20), 16, 3),
        ([150, 150], 4, 2, 48, 32, branches.window(64), 32, 2),
        ([90, 5, 40], 32, 1, 32, 16, branches.window(33), 16, 2),
        ([300], 8, 2, 48, 32, branches.compression(8, 4), 16, 3),
        ([300, 300], 6, 1, 32, 32, branches.compression(16, 8), 16, 2),
        ([100, 7, 400], 8, 1, 48, 16, branches.compression(8, 4), 32, 3),
    ],
    ids=str,
)
def test_the_window_and_the_compressed_branch(
    seeds: list[int],
    lengths: list[int],
    H: int,
    G: int,
    d_k: int,
    d_v: int,
    places: branches.Places,
    bn: int,
    stages: int,
) -> None:
    assert_attends(lengths, H, G, d_k, d_v, places, bn, stages)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "sizes", "stages", "ranges"),
    [
        ([700], 8, 2, 48, (8, 4, 16), 3, False),
        ([400, 400], 16, 1, 32, (8, 4, 16), 2, False),
        ([700, 9, 120], 12, 2, 48, (8, 4, 16), 4, False),
        ([300], 6, 1, 32, (4, 1, 8), 2, False),
        ([500], 8, 1, 32, (16, 8, 16), 3, True),
        ([300, 80], 4, 1, 32, (8, 4, 16), 3, True),
    ],
    ids=str,
)
def test_the_importance_of_blocks(
    seeds: list[int],
    lengths: list[int],
    H: int,
    G: int,
    d_k: int,
    sizes: tuple[int, int, int],
    stages: int,
    ranges: bool,
) -> None:
    assert_finds_blocks(lengths, H, G, d_k, sizes, stages, ranges=ranges)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "places", "bn", "stages", "add"),
    [
        ([150], 8, 2, 48, 16, branches.window(20), 16, 3, False),
        ([150, 150], 4, 2, 32, 32, branches.window(64), 32, 2, True),
        ([90, 5, 40], 32, 1, 48, 16, branches.window(33), 16, 2, True),
        ([300], 8, 2, 48, 32, branches.compression(8, 4), 16, 3, False),
        ([300, 300], 6, 1, 32, 32, branches.compression(16, 8), 16, 2, False),
        ([100, 7, 400], 8, 1, 48, 16, branches.compression(8, 4), 32, 3, True),
    ],
    ids=str,
)
def test_the_gradient_of_queries(
    seeds: list[int], lengths: list[int], H: int, G: int, d_k: int, d_v: int, places: branches.Places, bn: int, stages: int,
    add: bool,
) -> None:  # fmt: skip
    assert_gives_gradients("dq", lengths, H, G, d_k, d_v, places, bn, stages, add=add)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "places", "bn", "stages"),
    [
        ([150], 16, 2, 64, 64, branches.window(20), 16, 3),
        ([200, 200], 16, 1, 128, 64, branches.window(64), 32, 2),
        ([140, 5, 40], 32, 1, 64, 128, branches.window(33), 64, 2),
        ([700], 16, 2, 64, 64, branches.compression(8, 4), 32, 3),
        ([300, 300], 8, 1, 64, 64, branches.compression(16, 8), 16, 2),
        ([300, 7, 700], 16, 1, 64, 64, branches.compression(8, 4), 64, 2),
    ],
    ids=str,
)
def test_the_gradients_of_keys_and_values(
    seeds: list[int], lengths: list[int], H: int, G: int, d_k: int, d_v: int, places: branches.Places, bn: int, stages: int
) -> None:  # fmt: skip
    assert_gives_gradients("dkv", lengths, H, G, d_k, d_v, places, bn, stages)


@pytest.mark.parametrize(
    ("lengths", "H", "G", "d_k", "d_v", "l_sel", "stages", "ranges"),
    [
        ([200], 16, 1, 64, 64, 64, 3, False),
        ([150, 150], 16, 2, 128, 64, 64, 2, False),
        ([300, 9, 80], 32, 1, 64, 128, 64, 3, False),
        ([300], 16, 1, 64, 64, 128, 2, False),
        ([300], 16, 2, 64, 64, 96, 2, False),
        ([300, 80], 64, 1, 64, 64, 64, 3, True),
    ],
    ids=str,
)
def test_the_selected_branch(
    seeds: list[int], lengths: list[int], H: int, G: int, d_k: int, d_v: int, l_sel: int, stages: int, ranges: bool
) -> None:
    assert_attends_to_picks(lengths, H, G, d_k, d_v, l_sel, stages, ranges=ranges)


@pytest.mark.parametrize("lengths", [[150, 150], [100, 30, 80]], ids=str)
def test_a_nan_in_the_next_sequence_changes_nothing(seeds: list[int], lengths: list[int]) -> None:
    assert_attends_to_picks(lengths, 16, 1, 64, 64, 64, 2, nan=True)


def without(module: ModuleType, line: int, folder: Path) -> ModuleType:
    """Return a module of kernels without a line of it."""
    lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
    lines[line] = re.sub(r"\S.*", "pass", lines[line])
    path = folder / "changed.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


def replace_kernel(monkeypatch: pytest.MonkeyPatch, module: ModuleType, changed: ModuleType) -> None:
    """Let `launches` use the kernel of a changed module."""
    name = "selected_forward_tma" if module is selection_forward_tma else module.__name__
    monkeypatch.setattr(launches, name, getattr(changed, name))


@pytest.mark.parametrize("module", [importance_overlapped, selection_forward_tma], ids=lambda x: x.__name__)
def test_a_stage_that_two_consumers_share_is_a_fault(
    seeds: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: ModuleType
) -> None:
    """A consumer that skips a stage's phase takes the one before it for its own: why stages are even."""
    lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
    (line,) = (i for i, text in enumerate(lines) if "static_assert(STAGES" in text)
    replace_kernel(monkeypatch, module, without(module, line, tmp_path))
    monkeypatch.setattr(launches, "even_stages", lambda ring: 3)
    works = finds_blocks if module is importance_overlapped else attends_to_picks
    assert_fails_in_some_order(seeds, works)


def assert_fails_in_some_order(seeds: list[int], works: Callable[[], None]) -> None:
    def run_in_many_orders() -> None:
        for _ in range(20):
            seeds[0] += 1000
            works()

    with pytest.raises((simulated.Hazard, AssertionError)):
        run_in_many_orders()


def synchronizations(module: ModuleType) -> list[int]:
    """Return the lines at which kernels wait, arrive and fence."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    return [i for i, line in enumerate(text.splitlines()) if SYNCHRONIZES.match(line)]


def attends() -> None:
    assert_attends([200], 8, 2, 48, 32, branches.compression(8, 4), 16, 2)


def gives_dq() -> None:
    assert_gives_gradients("dq", [200], 8, 2, 48, 32, branches.compression(8, 4), 16, 2)


def gives_dkv() -> None:
    assert_gives_gradients("dkv", [100], 8, 1, 64, 64, branches.window(200), 16, 2)


def finds_blocks() -> None:
    assert_finds_blocks([1000], 8, 1, 48, (8, 4, 16), 2)


def attends_to_picks() -> None:
    assert_attends_to_picks([300], 16, 1, 64, 64, 64, 2)


@pytest.mark.parametrize(
    ("module", "line", "works"),
    [
        (module, line, works)
        for module, works in (
            (strided_overlapped, attends),
            (strided_dq_overlapped, gives_dq),
            (strided_dkv_overlapped, gives_dkv),
            (importance_overlapped, finds_blocks),
            (selection_forward_tma, attends_to_picks),
        )
        for line in synchronizations(module)
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_synchronization_is_needed(
    seeds: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    module: ModuleType,
    line: int,
    works: Callable[[], None],
) -> None:
    """A kernel without it reads early, overwrites or waits for ever, in one of some orders."""
    replace_kernel(monkeypatch, module, without(module, line, tmp_path))
    assert_fails_in_some_order(seeds, works)
