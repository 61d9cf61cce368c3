from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from flashnorm.errors import GradientError
from flashnorm.kernels import backward, rms_linear
from flashnorm.kernels.two_stream import overlapped_rms_linear
from tests.kernels import cases

EPS = 1e-5
WIDTH, OUTPUTS = 24, 10


def stock(x: Tensor, weight: Tensor, eps: float, *, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], gain, eps), weight, bias)


def operands(dtype: torch.dtype, *, gain: bool = True, bias: bool = True, scale: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(cases.DEVICE, dtype).requires_grad_()

    x = (normal(2, 3, WIDTH).detach() * scale).requires_grad_()
    return [x, normal(OUTPUTS, WIDTH), normal(WIDTH) if gain else None, normal(OUTPUTS) if bias else None]


def deferred(x: Tensor, weight: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    return rms_linear(x, weight, EPS, gain=gain, bias=bias)


@pytest.mark.parametrize(("gain", "bias"), [(True, True), (False, True), (True, False), (False, False)])
def test_first_and_second_derivatives(gain, bias):
    given = operands(torch.float64, gain=gain, bias=bias)
    assert gradcheck(deferred, given)
    assert gradgradcheck(deferred, given)


def test_where_epsilon_matters():
    given = operands(torch.float64, scale=1e-3)
    assert gradcheck(deferred, given, eps=1e-8)


class _Faulty(torch.autograd.Function):
    """The operation with the backward's epsilon lost."""

    @staticmethod
    def forward(ctx, x, weight, gain, bias):
        backward.keep(ctx, (x, weight, 0.0, gain, bias, False), x)
        return stock(x, weight, EPS, gain=gain, bias=bias)

    @staticmethod
    def backward(ctx, dy):
        ctx_like = type("Context", (), {"saved_tensors": ctx.saved_tensors, "eps": ctx.eps})()
        needs = ctx.needs_input_grad
        ctx_like.needs_input_grad = (needs[0], needs[1], False, needs[2], needs[3], False)
        dx, dweight, _, dgain, dbias, _ = backward.gradients(ctx_like, dy)
        return dx, dweight, dgain, dbias


def test_a_lost_epsilon_is_seen():
    assert not gradcheck(_Faulty.apply, operands(torch.float64, scale=1e-3), eps=1e-8, raise_exception=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_to_fp64_as_the_plain_sequence(dtype):
    """Over many rows, so that single roundings average out."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((512, 64), (96, 64), (64,), (96,))
    data = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).double() for size in sizes]
    dy = torch.randn(512, 96, generator=generator, dtype=torch.float64).to(dtype).double()

    def of(function: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        x, weight, gain, bias = (t.to(cases.DEVICE, kind).requires_grad_() for t in data)
        y = function(x, weight, EPS, gain=gain, bias=bias)
        return [g.double() for g in torch.autograd.grad(y, (x, weight, gain, bias), dy.to(cases.DEVICE, kind))]

    for exact, mine, plain in zip(of(stock, torch.float64), of(rms_linear, dtype), of(stock, dtype), strict=True):
        assert (mine - exact).norm() <= 1.05 * (plain - exact).norm() + 2.0**-20 * exact.norm()


def test_only_what_is_asked_for():
    x, weight, gain, bias = operands(torch.float64)
    frozen = [t.detach() for t in (weight, gain, bias)]
    y = rms_linear(x, frozen[0], EPS, gain=frozen[1], bias=frozen[2])
    y.sum().backward()
    assert x.grad is not None
    rms_linear(x.detach(), weight, EPS, gain=gain, bias=bias).sum().backward()
    assert all(t.grad is not None for t in (weight, gain, bias))


def test_compiled_whole():
    given = operands(torch.float64)
    compiled = torch.compile(deferred, fullgraph=True, backend="aot_eager")
    wanted = [t for t in given if t is not None]
    expected, actual = (torch.autograd.grad(f(*given).square().sum(), wanted) for f in (deferred, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_no_gradient_into_a_given_buffer_or_through_two_streams():
    x, weight, *_ = operands(torch.float32)
    with pytest.raises(GradientError, match="x requires grad, but with out"):
        rms_linear(x, weight, EPS, out=torch.empty(2, 3, OUTPUTS, device=x.device))
    with pytest.raises(GradientError, match="x requires grad, but this operation"):
        overlapped_rms_linear(x[0], weight, EPS)


class _Tiny(nn.Module):
    """Two residual blocks and a head, every linear behind a norm."""

    def __init__(self, normed_linear: Callable[..., Tensor]) -> None:
        super().__init__()
        self.normed_linear = normed_linear
        self.embedding = nn.Embedding(32, WIDTH)
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 48) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(48, WIDTH) for _ in range(2))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for up, down, gain in zip(self.ups, self.downs, self.gains, strict=False):
            x = x + down(F.silu(self.normed_linear(x, up.weight, EPS, gain=gain, bias=up.bias)))
        return self.normed_linear(x, self.head.weight, EPS, gain=self.gains[2], bias=self.head.bias)


def losses(normed_linear: Callable[..., Tensor], nudge: float = 0.0) -> Tensor:
    """200 steps on sequences where each token decides the next; weights begin `nudge` away from the usual ones."""
    torch.manual_seed(0)
    model = _Tiny(normed_linear)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + nudge)
    optimiser, following = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.randperm(32)
    curve = []
    for _ in range(200):
        ids = torch.randint(32, (64,))
        loss = F.cross_entropy(model(ids), following[ids])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        curve.append(loss.detach())
    return torch.stack(curve)


def test_a_model_learns_as_with_the_plain_sequence():
    """The curves part no farther than a few times as far as two plain runs whose weights began an ulp apart: a step
    rounds some four sums in another order."""
    plain, mine, nudged = losses(stock), losses(rms_linear), losses(stock, nudge=2.0**-23)
    assert plain[-1] < 0.2 * plain[0]
    assert (mine - plain).abs().max() <= 4 * (nudged - plain).abs().max()
