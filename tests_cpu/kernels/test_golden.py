"""Agreement with peers: fla's reference functions and lucidrains' window, as `golden.py` recorded them."""

import pytest
import torch

from nsa.kernels import blocks, ops, reference
from nsa.kernels.cpu import tiles as cpu_tiles
from tests_cpu.kernels.golden import BLOCK, CHOSEN, FOLDER, WIDTH, WINDOW

SIZES = {"l": BLOCK, "d": BLOCK, "l_sel": BLOCK, "scale": WIDTH**-0.5}


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(FOLDER / "golden_fla.pt", weights_only=True)
    return found


def inputs(golden: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [golden[name].clone().requires_grad_() for name in "qkv"]


def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (-1, BLOCK)).mean(2)


def compare(golden: dict[str, torch.Tensor], name: str, out: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(out, golden[f"{name}.out"], rtol=0, atol=2e-6)
    gradients = torch.autograd.grad(out, leaves, golden[f"{name}.weight"])
    for x, gradient in zip("qkv", gradients, strict=True):
        torch.testing.assert_close(gradient, golden[f"{name}.grad_{x}"], rtol=1e-5, atol=1e-5)


def chosen(golden: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return fla's selection in our form, bool [B, S, G, Ns]; in fla's, -1 is not a block."""
    indices = golden["indices"]
    n_blocks = blocks.num_selection(indices.shape[1], BLOCK)
    found = torch.zeros(*indices.shape[:3], n_blocks + 1, dtype=torch.bool)
    return found.scatter(-1, indices.where(indices >= 0, n_blocks), True)[..., :n_blocks]


def test_the_compressed_branch_and_what_it_selects(golden: dict[str, torch.Tensor]) -> None:
    q, k, v = leaves = inputs(golden)
    out, importance = reference.compressed(q, pooled(k), pooled(v), **SIZES)
    compare(golden, "cmp", out, leaves)
    assert torch.equal(blocks.select(importance, BLOCK, CHOSEN), chosen(golden))


def test_the_selected_branch(golden: dict[str, torch.Tensor]) -> None:
    q, k, v = leaves = inputs(golden)
    out = reference.selected(q, k, v, chosen(golden), l_sel=BLOCK, n_sel=CHOSEN, scale=SIZES["scale"])
    compare(golden, "sel", out, leaves)


def test_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = torch.load(FOLDER / "golden_lucidrains.pt", weights_only=True)
    q, k, v = leaves = inputs(golden)
    compare(golden, "win", reference.sliding(q, k, v, w=WINDOW, scale=WIDTH**-0.5), leaves)
    monkeypatch.setattr(cpu_tiles, "MOST", 16)
    compare(golden, "win", ops.sliding(q, k, v, WINDOW, WIDTH**-0.5, "cpu")[0], leaves)
