"""`static_weight` promises for the caller's weight, not for a copy that the operation has just made of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashnorm.kernels import gated_ops, ops, rms_linear, rms_linear_w8a8, rms_swiglu_linear, w8a8_ops
from tests.kernels import cases


def _eight_bits(x: Tensor, weight: Tensor, *, static_weight: bool) -> Tensor:
    return rms_linear_w8a8(x, weight, torch.ones(len(weight), device=x.device), cases.EPS, static_weight=static_weight)


def _linear(x: Tensor, weight: Tensor, *, static_weight: bool) -> Tensor:
    return rms_linear(x, weight, cases.EPS, static_weight=static_weight)


def _gated(x: Tensor, weight: Tensor, *, static_weight: bool) -> Tensor:
    return rms_swiglu_linear(x, weight, cases.EPS, static_weight=static_weight)


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("module", "operation", "dtype"),
    [(ops, _linear, torch.bfloat16), (gated_ops, _gated, torch.bfloat16), (w8a8_ops, _eight_bits, torch.int8)],
)
def test_a_weight_that_was_copied_is_not_static(module, operation: Callable, dtype, transposed, promised, monkeypatch):
    run, told = module.run, []

    def spying(*given: object, static_weight: bool) -> None:
        told.append(static_weight)
        run(*given, static_weight=static_weight)

    monkeypatch.setattr(module, "run", spying)
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=cases.DEVICE)
    weight = torch.ones(32, 64, device=cases.DEVICE).to(dtype)
    operation(x, weight.t().contiguous().t() if transposed else weight, static_weight=promised)
    assert told == [promised and not transposed]
