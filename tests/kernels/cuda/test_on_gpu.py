"""On a Hopper GPU: what the kernels in CUDA C++ compute. Their counterpart on the CPU is the reference's own tests."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from flashnorm.kernels import rms_linear, rms_swiglu_linear
from flashnorm.kernels.bounds import exceeds, expected_rms_linear, expected_rms_swiglu_linear
from flashnorm.kernels.configs import Config, Gemv, NormLinear, Skinny, SplitK, Streamed, TmaGemm
from flashnorm.kernels.decode.shapes import AttentionShape
from flashnorm.kernels.dispatch import STREAMED, cuda_runs
from flashnorm.kernels.run import run
from flashnorm.kernels.surroundings import Surroundings
from tests.kernels import cases
from tests.kernels.decode.attending import check, operands
from tests.kernels.surrounded import expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not cuda_runs(torch.device("cuda", 0)),
        reason="needs a Hopper GPU and cuda-bindings",
    ),
]

GEMMS = [
    TmaGemm(64, 48, 1, 8, "beside"),
    TmaGemm(64, 128, 1, 4, "inside"),
    TmaGemm(128, 192, 2, 4, "beside"),
    TmaGemm(128, 256, 2, 4, "inside"),
    TmaGemm(256, 96, 2, 4, "inside"),  # an odd number of stores for each slab: their two buffers must not cross
    TmaGemm(128, 96, 2, 6, "beside", 16),
]
STREAMS = [Streamed(prefetch=12), STREAMED, Streamed(2048, 3, 8, 1, 2, 8, 2, 50, 2)]
SKINNY = [Skinny(32, 4, 12), Skinny(64, 1, 4), Skinny(64, 8, 4), Skinny(128, 2, 4)]
HALF = [torch.bfloat16, torch.float16]


def _rows(config: Config, many: int) -> int:
    """As many as the kernel takes, and `many` at most."""
    return 1 if isinstance(config, Streamed) else 30 if isinstance(config, Skinny) else many


def kernel(config: Config, activation: str | None = None) -> cases.Kernel:
    return lambda x, weight, gain, bias, out: run(config, x, weight, cases.EPS, None, bias, out, activation)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("config", GEMMS)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 64, 8), (17, 576, 968), (63, 2880, 40), (257, 1000, 1208), (1024, 512, 3080), (8200, 1088, 264)],
)
def test_gemm_matches_fp64(m, k, n, config, dtype):
    cases.assert_exact_enough(kernel(config), cases.case(m, k, n, dtype, bias=True, pad=8))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "config",
    [
        Streamed(1024, 24, 4),
        Streamed(2048, 12, 8, 2, 12),
        Streamed(4096, 3, 8, 1, 0, 4, 2, 50, 2),
        Streamed(2048, 5, 8, 1, 6, 4, 3, 50, 0),
    ],
)
@pytest.mark.parametrize(("k", "n"), [(8, 8), (576, 960), (2880, 1000), (4096, 6144), (28672, 264)])
def test_streamed_matches_fp64(k, n, config, dtype):
    cases.assert_exact_enough(kernel(config), cases.case(1, k, n, dtype, bias=True, pad=8))


@pytest.mark.parametrize(
    "configs",
    [
        (Streamed(2048, 12, 8, 1, 0),),
        (Streamed(4096, 4, 8, 2),),
        (Streamed(4096, 3, 8, 1, 2, 4, 2, 50, None),),  # two launches at a time, the next let in at once,
        (Streamed(4096, 3, 8, 1, 2, 4, 2, 50, 2),),  # or while the last chunks come,
        (Streamed(2048, 2, 8, 1, 0, 4),),  # or at once, and five at a time
        (Gemv(2, 4096, 8),),
        (Gemv(2, 1024, 4),),
        (TmaGemm(64, 128, 1, 6, "beside"),),
        (TmaGemm(64, 32, 1, 16, "inside"), Gemv(2, 4096, 8), TmaGemm(64, 48, 1, 8, "beside")),
        # One that lets the next kernel in before its own wait, among kernels that do so after it.
        (Streamed(2048, 2, 8, 1, 0, 4), Gemv(2, 4096, 8), SplitK(64, 128, 4), NormLinear()),
        (Skinny(32, 4, 12),),
        (Skinny(64, 4, 6), SplitK(64, 128, 4), Skinny(32, 8, 4), TmaGemm(64, 48, 1, 8, "beside")),
    ],
)
def test_static_weights_in_a_chain_of_early_launches(configs):
    """Each product is the next one's x, so that whoever reads x too early is seen."""
    weights = [torch.randn(4096, 4096, device="cuda").mul_(0.02).bfloat16() for _ in range(8)]
    start = torch.randn(1, 4096, device="cuda").bfloat16()
    rows = [start, *(torch.empty_like(start) for _ in weights)]

    def chain(*, alone: bool) -> None:
        for x, weight, out, config in zip(rows, weights, rows[1:], cycle(configs), strict=False):
            run(config, x, weight, cases.EPS, None, None, out, static_weight=not alone)
            if alone:
                torch.cuda.synchronize()

    chain(alone=True)
    wanted = [row.clone() for row in rows]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(alone=False)
    for _ in range(200):
        for row in rows[1:]:
            row.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(row, value) for row, value in zip(rows, wanted, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(2, 64, 8), (8, 576, 968), (17, 2880, 40), (32, 8192, 2048), (63, 1000, 1208)]
)
def test_few_rows_match_fp64(m, k, n, config, dtype):
    cases.assert_exact_enough(kernel(config), cases.case(m, k, n, dtype, bias=True, pad=8))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", SKINNY)
@pytest.mark.parametrize("static_weight", [False, True])
def test_few_rows_end_a_block(config, static_weight, out_dtype):
    operands = cases.case(20, 2048, 1000, torch.bfloat16, bias=True)
    from flashnorm.kernels.cuda.skinny import skinny

    residual = torch.randn(20, 1008, device="cuda").bfloat16()[:, :1000]
    around = Surroundings(bias=operands.bias, multiplier=0.5, residual=residual)
    out = torch.full((20, 1000), float("nan"), device="cuda", dtype=out_dtype)
    skinny(operands.x, operands.weight, out, around, config, static_weight=static_weight)
    assert exceeds(out, expected(operands.x, operands.weight, around, out_dtype)) <= 1


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(
    "config", [TmaGemm(64, 48, 1, 8, "beside"), TmaGemm(128, 256, 2, 3, "inside"), *STREAMS, *SKINNY]
)
def test_gated_forms_match_fp64(config, activation):
    m = _rows(config, 130)
    operands = cases.case(m, 576, 2 * 968, torch.bfloat16)
    out = torch.full((m, 968), float("nan"), device="cuda", dtype=torch.bfloat16)
    run(config, operands.x, operands.weight, cases.EPS, None, None, out, activation)
    expected = expected_rms_swiglu_linear(operands.x, operands.weight, cases.EPS, activation=activation)
    assert exceeds(out, expected) <= 1


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
@pytest.mark.parametrize("config", [*GEMMS, *STREAMS, *SKINNY])
def test_extreme_rms_in_fp16(config, scale):
    m = _rows(config, 70)
    cases.assert_exact_enough(kernel(config), cases.case(m, 512, 264, torch.float16, scale=scale))


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("config", [*GEMMS, *SKINNY])
def test_specials_stay_in_their_row(config, special):
    operands = cases.case(_rows(config, 70), 512, 264, torch.bfloat16)
    operands.x[13, 100] = special
    out = cases.run_guarded(kernel(config), operands)
    assert not out[13].isfinite().any()
    assert out[:13].isfinite().all()
    assert out[14:].isfinite().all()


@pytest.mark.parametrize("config", [*GEMMS, *STREAMS, *SKINNY])
def test_the_same_bits_a_thousand_times_and_under_load(config):
    m = _rows(config, 200)
    operands = cases.case(m, 2048, 3072, torch.bfloat16)
    first = cases.run_guarded(kernel(config), operands)
    out, noise = torch.empty_like(first), torch.randn(4096, 4096, device="cuda")
    other, wrong = torch.cuda.Stream(), torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        if turn % 8 == 0:
            with torch.cuda.stream(other):
                noise = noise @ noise * 1e-3
        out.fill_(float("nan"))
        kernel(config)(operands.x, operands.weight, None, None, out)
        wrong += (out != first).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("config", [GEMMS[0], TmaGemm(128, 192, 2, 4, "beside"), GEMMS[-1]])
def test_two_graphs_at_once_do_not_meet(config):
    """Both captured on one stream, replayed on two: they must not share their counters."""
    operands = [cases.case(100, 2048, 3072, torch.bfloat16) for _ in range(2)]
    operands[1].x.mul_(2)
    operands[1].weight.neg_()
    wanted = [cases.run_guarded(kernel(config), operand) for operand in operands]
    outs = [torch.empty_like(value) for value in wanted]
    graphs = [torch.cuda.CUDAGraph() for _ in operands]
    for graph, operand, out in zip(graphs, operands, outs, strict=True):
        with torch.cuda.graph(graph):
            for _ in range(20):
                kernel(config)(operand.x, operand.weight, None, None, out)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, value) for out, value in zip(outs, wanted, strict=True))


def test_operands_of_more_than_two_to_the_31_elements():
    k, n = 4096, 2**19 + 64
    x = torch.randn(1, k, device="cuda").bfloat16()
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    weight[-64:] = torch.randn(64, k, device="cuda")
    out = rms_linear(x, weight, cases.EPS)
    assert exceeds(out[:, -64:], expected_rms_linear(x, weight[-64:], cases.EPS)) <= 1
    assert (out[:, :-64] == 0).all()


def test_chosen_for_what_the_table_lists():
    operands = cases.case(256, 2048, 2 * 8192, torch.bfloat16)
    out = rms_swiglu_linear(operands.x, operands.weight, cases.EPS)
    expected = expected_rms_swiglu_linear(operands.x, operands.weight, cases.EPS)
    assert exceeds(out, expected) <= 1


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(32, 8, 64, 0.125),
        AttentionShape(32, 8, 64, 0.125, rotary=32),
        AttentionShape(16, 8, 128, 0.09, rotary=64, interleaved=True),
        AttentionShape(9, 3, 64, 0.125, window=50),
        AttentionShape(8, 4, 256, 0.0625, softcap=50.0),
    ],
)
def test_attention_over_rows_matches_fp64(shape, splits, dtype, monkeypatch):
    from flashnorm.kernels.cuda import attention

    monkeypatch.setattr(attention, "splits_for", lambda rows, kv_heads: splits)

    def attend(given):
        assert attention.takes(given.qkv, given.keys, given.shape)
        out = torch.full((len(given.qkv), shape.heads * shape.head_dim), float("nan")).to(given.qkv)
        tensors = given.qkv, given.keys, given.values, given.slots, given.positions, given.tables, out
        attention.attention(*tensors, given.shape, given.norms)
        return out

    check(operands(shape, positions=(0, 1, 128, 199), dtype=dtype), attend)
