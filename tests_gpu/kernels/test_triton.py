"""The Triton kernels on a GPU, against float64 by the equations on the same GPU: `pytest -m gpu tests_gpu/kernels`."""

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from nsa import KVCache, NSAAttention, Sizes, explain, nsa_attention, reference_attention
from nsa.kernels import blocks, ops, reference, sdpa
from nsa.kernels.triton import decoding, sequences, single
from pytest_nsa import gpu
from tests_cpu.kernels.agreement import Inputs, gradients, leaves, sizes_of_inputs

pytestmark = gpu

# The largest error of an output of size about 1, and of a gradient relative to its largest.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 1e-2), torch.bfloat16: (3e-2, 5e-2)}
SHAPES = {
    "paper": (1, 1100, 64, 4, 192, 128), "125m": (2, 1537, 12, 2, 64, 64), "multi-query": (1, 700, 8, 1, 128, 128),
    "multi-head": (1, 500, 4, 4, 64, 64), "short": (3, 20, 12, 2, 64, 64), "64 heads": (1, 300, 64, 1, 128, 128),
    "odd": (1, 333, 5, 1, 80, 24), "widest": (1, 300, 8, 2, 256, 256),
}  # fmt: skip
SIZES = Sizes(32, 16, 64, 16, 512)
WIDE_BLOCKS = SIZES._replace(select_block=128)
OTHER_SIZES = Sizes(24, 8, 96, 5, 77)
# Each combination compiles its own kernels, for seconds: every shape in bfloat16, some in the other types and sizes. The
# interpreter runs the rest (tests_cpu/kernels).
ALL_TYPES = [
    (shape, dtype) for shape in SHAPES for dtype in TOLERANCE if dtype == torch.bfloat16 or shape in ("125m", "odd")
]
WHOLE = [
    *((shape, torch.bfloat16, SIZES, False) for shape in SHAPES),
    *((shape, torch.float32, SIZES, False) for shape in ("paper", "125m", "odd", "widest")),
    *((shape, torch.bfloat16, WIDE_BLOCKS, False) for shape in ("paper", "64 heads", "short")),
    *((shape, torch.bfloat16, OTHER_SIZES, False) for shape in ("paper", "125m", "odd")),
    *(("paper", torch.bfloat16, sizes, True) for sizes in (SIZES, WIDE_BLOCKS)),
    *((shape, torch.bfloat16, SIZES, True) for shape in ("125m", "short")),  # of a batch: with a table of its sequences
    ("125m", torch.float32, OTHER_SIZES, True),
]


def drawn(dtype: torch.dtype, *sizes: tuple[int, ...]) -> tuple[Inputs, Inputs]:
    return leaves(dtype, *sizes, device="cuda")


def compare(found: torch.Tensor, wanted: torch.Tensor, inputs: Inputs, exact: Inputs) -> None:
    """Compare output and gradients."""
    forward, backward = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found.double(), wanted, rtol=0, atol=forward * max(1.0, float(wanted.detach().abs().max()))
    )
    weight = torch.randn_like(wanted).to(found.dtype)
    for a, e in zip(gradients(found, inputs, weight), gradients(wanted, exact, weight), strict=True):
        if e.numel():
            assert (a.double() - e).abs().max() <= backward * max(1.0, float(e.abs().max()))


@pytest.mark.parametrize(("shape", "dtype"), ALL_TYPES, ids=str)
def test_each_branch(shape: str, dtype: torch.dtype) -> None:
    B, S, H, G, Dk, Dv = SHAPES[shape]
    scale, n_cmp, n_blocks = Dk**-0.5, blocks.num_compressed(S, 32, 16), blocks.num_selection(S, 64)
    inputs, exact = drawn(dtype, (B, S, H, Dk), (B, S, G, Dk), (B, S, G, Dv))
    compare(ops.sliding(*inputs, 512, scale, "triton")[0], reference.sliding(*exact, w=512, scale=scale), inputs, exact)
    n_sel = min(8, n_blocks)
    chosen = blocks.select(torch.rand(B, S, G, n_blocks, device="cuda"), 64, n_sel)
    wanted = reference.selected(*exact, chosen, l_sel=64, n_sel=n_sel, scale=scale)
    compare(ops.selected(*inputs, chosen, 64, n_sel, scale, "triton")[0], wanted, inputs, exact)
    inputs, exact = drawn(dtype, (B, S, H, Dk), (B, n_cmp, G, Dk), (B, n_cmp, G, Dv))
    found, _, importance = ops.compressed(*inputs, 32, 16, 64, scale, "triton")
    wanted, expected = reference.compressed(*exact, l=32, d=16, l_sel=64, scale=scale)
    compare(found, wanted, inputs, exact)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(importance.double(), expected, rtol=0, atol=tolerance * H // G + tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype", "sizes", "ranges"),
    WHOLE,
    ids=lambda x: f"l'={x.select_block}" if isinstance(x, Sizes) else str(x),
)
def test_the_whole(
    shape: str, dtype: torch.dtype, sizes: dict[str, int], ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block is selected, so that rounding cannot change which. With ``ranges``, queries are in as many as possible."""
    if ranges:
        monkeypatch.setattr(sequences, "PARTS", 1)
    n_cmp = blocks.num_compressed(SHAPES[shape][1], *sizes[:2])
    inputs, exact = drawn(dtype, *sizes_of_inputs(*SHAPES[shape], n_cmp))
    settings = {"sizes": sizes._replace(n_select=64)}
    compare(
        nsa_attention(*inputs, **settings, backend="triton"), reference_attention(*exact, **settings), inputs, exact
    )


@pytest.mark.parametrize(("dtype", "ranges"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("lengths", [[5, 0, 400], [300, 700, 64, 1, 200], [1] * 50])
def test_a_pack(lengths: list[int], dtype: torch.dtype, ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if ranges:
        monkeypatch.setattr(sequences, "PARTS", 1)
    compare_pack(lengths, 12, dtype)


def compare_pack(lengths: list[int], heads: int, dtype: torch.dtype) -> None:
    """A pack gives what each of its sequences gives alone."""
    S = sum(lengths)
    n_cmp = sum(blocks.num_compressed(n, 32, 16) for n in lengths)
    inputs, exact = drawn(dtype, *sizes_of_inputs(1, S, heads, 2, 64, 64, n_cmp))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    settings = {"sizes": SIZES._replace(n_select=12), "cu_seqlens": ends}
    compare(
        nsa_attention(*inputs, **settings, backend="triton"), reference_attention(*exact, **settings), inputs, exact
    )


@pytest.mark.parametrize("what", ["equal", "huge", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_nan_for_finite_inputs(what: str, dtype: torch.dtype) -> None:
    S = 700
    n = blocks.num_compressed(S, 32, 16)
    inputs, _ = drawn(dtype, *sizes_of_inputs(1, S, 12, 2, 64, 64, n))
    with torch.no_grad():
        for x in inputs[:2] + inputs[3:4] + inputs[5:6]:
            x.fill_(1) if what == "equal" else x.mul_(100 if what == "huge" else 0)
    out = nsa_attention(*inputs, sizes=SIZES, backend="triton")
    assert torch.isfinite(out).all()
    for gradient in torch.autograd.grad(out.float().square().sum(), inputs):
        assert torch.isfinite(gradient).all()


def test_selection_equals_sorting() -> None:
    for importance in (
        torch.rand(2, 3000, 4, 47), torch.zeros(1, 1000, 1, 16), torch.randint(0, 3, (1, 2000, 2, 32)).float(),
        torch.rand(1, 65536, 1, 1024),
    ):  # fmt: skip
        importance = importance.cuda()
        assert torch.equal(single.select_blocks(importance, 64, 16), blocks.select(importance, 64, 16))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_same_bits_every_time(compiled: bool) -> None:
    inputs, _ = drawn(torch.bfloat16, *sizes_of_inputs(1, 3000, 12, 2, 64, 64, 186))
    assert explain("auto", torch.bfloat16, inputs[0].device)[0] == "triton"
    run = torch.compile(nsa_attention) if compiled else nsa_attention
    runs = []
    for _ in range(5):
        out = run(*inputs, sizes=SIZES)
        runs.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_forward_and_backward_are_captured_and_replayed() -> None:
    """The host reads nothing: a CUDA graph holds both, and its replay on other numbers gives what a call on them gives."""
    inputs, _ = drawn(torch.bfloat16, *sizes_of_inputs(1, 2048, 12, 2, 64, 64, 127))
    weight = torch.randn(1, 2048, 12, 64, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        out = nsa_attention(*inputs, sizes=SIZES)
        return [out.detach(), *torch.autograd.grad(out, inputs, weight)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    found = [x.clone() for x in captured]
    assert all(torch.equal(a, e) for a, e in zip(found, step(), strict=True))


@pytest.mark.timeout(170)
def test_sampled_rows_at_64k_tokens_agree_with_float64() -> None:
    """In the paper's shape, the output of some queries is recomputed one by one from what the kernels selected."""
    S, H, G, Dk, Dv = 65536, 64, 4, 192, 128
    n_cmp = blocks.num_compressed(S, 32, 16)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes_of_inputs(1, S, H, G, Dk, Dv, n_cmp)
    )
    gates = gates.sigmoid()
    scale = Dk**-0.5
    out, *_, picks, _, _ = torch.ops.nsa.attention(
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, None, 32, 16, 64, 16, 512, scale
    )
    for t in (0, 31, 1000, 8191, 40000, 65535):
        wanted = torch.zeros(H, Dv, dtype=torch.float64, device="cuda")
        for g in range(G):
            heads = slice(g * (H // G), (g + 1) * (H // G))
            tokens = torch.cat([torch.arange(j * 64, (j + 1) * 64) for j in picks[t, g].tolist() if j >= 0])
            branch_keys = (
                (k_cmp, v_cmp, torch.arange(blocks.num_compressed(t + 1, 32, 16))), (k_sel, v_sel, tokens[tokens <= t]),
                (k_win, v_win, torch.arange(max(0, t - 511), t + 1)),
            )  # fmt: skip
            for branch, (k, v, seen) in enumerate(branch_keys):
                if len(seen):
                    keys, values = k[0, seen.cuda(), g].double(), v[0, seen.cuda(), g].double()
                    p = (q[0, t, heads].double() @ keys.T * scale).softmax(-1)
                    wanted[heads] += gates[0, t, heads, branch, None].double() * (p @ values)
        torch.testing.assert_close(out[0, t].double(), wanted, rtol=0, atol=TOLERANCE[torch.bfloat16][0])


def test_memory_grows_as_the_length() -> None:
    """There is no S x S matrix, and none of S x S/d."""
    peaks = []
    for S in (8192, 16384):
        n = blocks.num_compressed(S, 32, 16)
        inputs, _ = drawn(torch.bfloat16, *sizes_of_inputs(1, S, 12, 2, 64, 64, n))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nsa_attention(*inputs, sizes=SIZES).sum().backward()
        scores = S * (S // 64) * 2 * 4  # bytes: importance in float32
        peaks.append(torch.cuda.max_memory_allocated() - before - scores)
    assert peaks[1] < 2.6 * peaks[0]


@pytest.mark.timeout(170)
def test_forward_and_backward_at_64k_tokens_stay_below_16_gb() -> None:
    """In the paper's shape; inputs are counted."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    n_cmp = blocks.num_compressed(65536, 32, 16)
    inputs = [
        torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for size in sizes_of_inputs(1, 65536, 64, 4, 192, 128, n_cmp)
    ]
    out = nsa_attention(*inputs, sizes=SIZES)
    out.backward(torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 16e9


def test_a_token_is_decoded_by_a_graph_that_is_replayed() -> None:
    q, gates = torch.randn(1, 1, 12, 64, device="cuda"), torch.rand(1, 1, 12, 3, device="cuda")
    cmp, sel, win = ([torch.randn(1, n, 2, 64, device="cuda") for _ in range(2)] for n in (124, 2000, 512))

    def attend() -> torch.Tensor:
        return decoding.attend(q, tuple(cmp), tuple(sel), tuple(win), gates, 1999, 32, 16, 64, 16, 512, 0.125)[0]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend()
    for _ in range(10):
        q.normal_()
        graph.replay()
        replayed = found.clone()
        assert torch.equal(replayed, attend())


@pytest.mark.parametrize("packed", [False, True])
def test_the_module_on_a_gpu_is_that_on_a_cpu(packed: bool) -> None:
    module = NSAAttention(64, 4, 2, 16, **SIZES._replace(n_select=40)._asdict())
    x, ends = torch.randn(1, 500, 64), torch.tensor([0, 100, 130, 500]) if packed else None
    wanted = module(x, cu_seqlens=ends)
    found = module.cuda()(x.cuda(), cu_seqlens=ends)
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize(("start", "n_sel"), [(2000, 40), (20, 16), (5000, 100)])
def test_tokens_against_a_cache(start: int, n_sel: int, T: int) -> None:
    """Decoding's kernels give what the equations give, in float32; so many blocks are picked that rounding cannot change which.

    The same bits each time.
    """
    module = NSAAttention(128, 12, 2, 64, **SIZES._replace(n_select=n_sel)._asdict()).cuda()
    x = torch.randn(2, start + T, 128, device="cuda")
    found = []
    for backend in ("reference", "triton"):
        module.backend, cache = "triton", KVCache(spare=T)
        with torch.no_grad():
            module(x[:, :start], cache)
            module.backend = backend
            found.append(module(x[:, start:], cache))
        again = []
        for _ in range(10 if backend == "triton" else 0):
            cache.crop(start)
            with torch.no_grad():
                again.append(module(x[:, start:], cache))
        assert all(torch.equal(y, found[-1]) for y in again)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("Dk", [64, 128])
def test_dense_attention_is_that_of_float64(Dk: int) -> None:
    inputs, exact = drawn(torch.bfloat16, (1, 1024, 8, Dk), (1, 1024, 2, Dk), (1, 1024, 2, Dk))
    compare(sdpa.dense(*inputs, scale=Dk**-0.5), reference.sliding(*exact, w=1024, scale=Dk**-0.5), inputs, exact)
