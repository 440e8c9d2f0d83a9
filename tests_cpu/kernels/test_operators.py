"""The operators inside PyTorch: compile, activation checkpointing, autocast, export, opcheck, the autograd graph's size."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nsa import NSAAttention, Sizes, load_config
from nsa.config import ModelConfig
from nsa.kernels import blocks, ops
from nsa.model.attention import Rotary
from nsa.model.transformer import Block


def make_module() -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 8, **Sizes(8, 4, 16, 5, 24)._asdict())


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    assert len(found) == len(list(module.parameters()))
    return found


@pytest.mark.slow
def test_operators_are_registered_as_torch_asks() -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).requires_grad_()

    q, k, v, c = random(1, 40, 4, 8), random(1, 40, 2, 8), random(1, 40, 2, 6), random(1, 9, 2, 8)
    chosen = blocks.select(torch.rand(1, 40, 2, 3), 16, 3)
    torch.library.opcheck(ops.sliding, (q, k, v, 9, 0.3, "cpu"))
    torch.library.opcheck(ops.selected, (q, k, v, chosen, 16, 3, 0.3, "cpu"))
    torch.library.opcheck(ops.compressed, (q, c, c, 8, 4, 16, 0.3, "cpu"))
    with torch.no_grad():
        o_cmp, lse_cmp, _ = ops.compressed(q, c, c, 8, 4, 16, 0.3, "cpu")
        o_sel, lse_sel = ops.selected(q, k, k, chosen, 16, 3, 0.3, "cpu")
        o_win, lse_win = ops.sliding(q, k, k, 9, 0.3, "cpu")
    made = (o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win, chosen)
    torch.library.opcheck(ops.whole, (random(1, 40, 4, 3), q, c, c, k, k, k, k, *made, 8, 4, 16, 9, 0.3))


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch, on Python 3.13.0
def test_a_block_compiles_without_a_graph_break() -> None:
    torch.manual_seed(0)
    model: ModelConfig = load_config("configs/tiny_cpu.yaml").model
    block = Block(model)
    x = torch.randn(2, 100, model.dim)
    expected = block(x)
    expected.square().sum().backward()
    wanted = gradients(block)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    found = compiled(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for a, e in zip(gradients(block), wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_recomputation_selects_the_same_blocks() -> None:
    module = make_module()
    selections: list[torch.Tensor] = []
    module.selection_listener = selections.append
    x = torch.randn(2, 200, 32)
    module(x).square().sum().backward()
    wanted = gradients(module)
    checkpoint(module, x, use_reentrant=False).square().sum().backward()
    assert len(selections) == 3  # the plain forward; the forward, and its recomputation in backward
    assert all(torch.equal(s, selections[0]) for s in selections)
    assert all(torch.equal(a, e) for a, e in zip(gradients(module), wanted, strict=True))


def test_the_same_bits_every_time() -> None:
    module = make_module()
    x = torch.randn(2, 300, 32)
    runs = []
    for _ in range(2):
        out = module(x)
        out.square().sum().backward()
        runs.append([out.detach(), *gradients(module)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_projection_is_called_where_somebody_hooks_or_replaces_it() -> None:
    """Projections are one product where no hook is set and none is replaced."""
    module = make_module()
    x = torch.randn(2, 100, 32)
    wanted = module(x)
    seen: list[torch.Size] = []
    module.v_win.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape))
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=1e-6)
    assert seen == [torch.Size([200, 16])]
    linears: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda one, _inputs, _output: linears.append(one) if isinstance(one, torch.nn.Linear) else None
    )
    module(x)
    handle.remove()
    assert len(linears) == len([one for one in module.modules() if isinstance(one, torch.nn.Linear)])
    with_bias = torch.nn.Linear(32, 16)
    module.k_win = with_bias
    module(x).sum().backward()
    assert with_bias.bias.grad is not None
    calls: list[torch.Tensor] = []
    plain = module.k_cmp.forward
    module.k_cmp.forward = lambda x: calls.append(x) or plain(x)  # type: ignore[method-assign, func-returns-value]
    module(x)
    assert len(calls) == 1


def test_what_is_kept_for_the_backward_is_what_it_reads() -> None:
    """No view is kept that holds the product of several projections alive: keys before their rotation, for example."""
    module = NSAAttention(64, 4, 4, 16, **Sizes(8, 4, 16, 5, 24)._asdict())
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        module(torch.randn(1, 500, 64))
    assert max(kept.values()) == 500 * 64 * 4  # bytes of x, of q, of k and v of a branch, and of an output


@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < "2.7", reason="torch 2.6 exports one length")
def test_the_module_is_exported_for_any_length() -> None:
    module = make_module()
    length = torch.export.Dim("length", min=33, max=500)
    exported = torch.export.export(module, (torch.randn(2, 90, 32),), dynamic_shapes=({1: length},))
    x = torch.randn(2, 201, 32)
    torch.testing.assert_close(exported.module()(x), module(x), rtol=0, atol=1e-6)


def test_autocast() -> None:
    module = make_module()
    x = torch.randn(2, 200, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(torch.isfinite(g).all() for g in gradients(module))
    assert (out.float() - module(x)).abs().max() < 0.05


def count_nodes(root: object) -> int:
    seen: set[object] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [n for n, _ in node.next_functions]  # type: ignore[attr-defined]
    return sum(not slices_nothing(node) for node in seen)


def slices_nothing(node: Any) -> bool:
    """Return whether it is the slice ``:`` of a dimension, for which torch 2.6 has a node and later ones have none."""
    if node.name() != "SliceBackward0":
        return False
    size = node._saved_self_sym_sizes[node._saved_dim]
    return node._saved_start == 0 and node._saved_end >= size and node._saved_step == 1


def test_the_graph_is_small_at_any_length() -> None:
    module = make_module()
    sizes = {count_nodes(module(torch.randn(1, S, 32)).grad_fn) for S in (50, 90, 333, 1000)}
    print(sizes)
    assert len(sizes) == 1
    assert sizes.pop() < 60 + len(list(module.parameters()))


@pytest.mark.parametrize("backend", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize("branch", ["cmp", "sel", "win", None])
def test_backward_inside_autocast(backend: str, branch: Any) -> None:
    torch.manual_seed(0)
    module = NSAAttention(32, 4, 2, 8, **Sizes(8, 4, 16, 5, 24)._asdict(), backend=backend, force_branch=branch)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(2, 100, 32)).float().square().sum().backward()
    assert all(torch.isfinite(g).all() for g in gradients(module))


def test_a_model_in_bfloat16_rotates_by_the_same_angles() -> None:
    rotary = Rotary(64, 10000.0)
    x, t = torch.randn(1, 8, 1, 64).bfloat16(), torch.arange(4096, 4104)
    wanted = rotary(x.double(), t)
    torch.testing.assert_close(torch.nn.Sequential(rotary).bfloat16()[0](x, t).double(), wanted, rtol=0, atol=0.1)
