"""Operands, guard rows and the comparison with the fp64 oracle, shared by the tests of all kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flashnorm.kernels.bounds import exceeds, expected_rms_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# Triton's interpreter truncates where it should round to bf16, and reads bf16 tiles wrongly through descriptors.
HALF_DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
HALF = HALF_DTYPES[-1]
Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]


def need_triton() -> None:
    """Skip the calling test module, with the reason, where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed; pip install 'flashnorm[gpu]'")


@dataclass
class Case:
    """(M, K) `x`, (N, K) `weight`, optional (K,) `gain` and (N,) `bias`, on the device under test."""

    x: Tensor
    weight: Tensor
    gain: Tensor | None = None
    bias: Tensor | None = None


def case(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    *,
    gain: bool = False,
    bias: bool = False,
    pad: int = 0,
    scale: float = 3.0,
) -> Case:
    """Random operands; `pad`: elements between the rows of x and of the weight, filled with NaN."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + k * 1009 + n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def strided(values: Tensor) -> Tensor:
        whole = torch.full((values.shape[0], values.shape[1] + pad), float("nan"))
        whole[:, : values.shape[1]] = values
        return whole.to(DEVICE, dtype)[:, : values.shape[1]]

    return Case(
        strided(normal(m, k) * scale),
        strided(normal(n, k) * k**-0.5),
        (1 + 0.3 * normal(k)).to(DEVICE, dtype) if gain else None,
        normal(n).to(DEVICE, dtype) if bias else None,
    )


def run_guarded(kernel: Kernel, operands: Case) -> Tensor:
    """Run into a poisoned buffer with guard rows and columns around the output; fail if a guard changed."""
    m, n = operands.x.shape[0], operands.weight.shape[0]
    whole = torch.full((m + 2, n + 16), float("nan"), device=DEVICE, dtype=operands.x.dtype)
    whole[0], whole[-1], whole[:, n:] = 7.0, 7.0, 7.0
    out = whole[1:-1, :n]
    kernel(operands.x, operands.weight, operands.gain, operands.bias, out)
    assert (whole[0] == 7).all()
    assert (whole[-1] == 7).all()
    assert (whole[:, n:] == 7).all()
    return out


def assert_exact_enough(kernel: Kernel, operands: Case, *, rounds_input: bool = False) -> None:
    """The kernel's output lies within the derived bound of the fp64 oracle, and comes out the same bits again."""
    out = run_guarded(kernel, operands)
    expected = expected_rms_linear(
        operands.x, operands.weight, EPS, operands.gain, operands.bias, rounds_input=rounds_input
    )
    assert exceeds(out, expected) <= 1
    assert torch.equal(out, run_guarded(kernel, operands))
