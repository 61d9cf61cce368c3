"""The battery of one operation: a sound one passes, and each planted fault is caught by the check that is meant."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from flashnorm.errors import ShapeError
from flashnorm.kernels import reference
from flashnorm.kernels.two_stream import overlapped_rms_linear
from flashnorm.verify.operation import excess, operation_battery
from tests.faults.streams import StaleProduct

DTYPES = (torch.float32, torch.bfloat16)


def _inputs(dtype: torch.dtype = torch.float32, rows: int = 5, width: int = 49):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (rows, 33))
    return x, weight, 1e-5


def _failed(operation, inputs, plain=reference.rms_linear) -> list[str]:
    return [outcome.name for outcome in operation_battery(operation, inputs, plain).failures]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sound_operation_passes(dtype: torch.dtype) -> None:
    report = operation_battery(overlapped_rms_linear, _inputs(dtype), reference.rms_linear)
    assert report.passed
    assert [outcome.name for outcome in report.outcomes] == ["parity", "lag", "batching", "determinism", "races"]
    assert operation_battery(overlapped_rms_linear, _inputs(dtype))["parity"].skipped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_buffer_of_the_call_before_is_found(dtype: torch.dtype) -> None:
    stale = StaleProduct(nn.Linear(49, 33, bias=False, dtype=dtype)).requires_grad_(False)
    report = operation_battery(lambda x, *_: stale(x), _inputs(dtype, rows=1))
    assert "lag" in [outcome.name for outcome in report.failures]
    assert "cannot be played on fake CUDA tensors" in report["races"].skipped  # its weight lies on the CPU


def test_a_stream_that_is_kept_out_of_reach_is_a_reason_to_skip_and_no_crash() -> None:
    @functools.lru_cache
    def side() -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def operation(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda":
            side().wait_stream(torch.cuda.current_stream())
        return x + 1

    x = torch.randn(3, 8)
    assert operation_battery(operation, (x,)).passed
    again = operation_battery(operation, (x,))  # the cache holds what the first play put there
    assert again.passed
    assert "made outside of the call that plays it" in again["races"].skipped


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_neighbours_element_is_found(dtype: torch.dtype) -> None:
    def overrun(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        beyond = torch.cat([x[1:, 0], torch.zeros_like(x[:1, 0])])
        return reference.rms_linear(torch.cat([x[:, :-1], (x[:, -1] + beyond)[:, None]], 1), weight, eps)

    assert _failed(overrun, _inputs(dtype)) == ["parity", "batching"]


def test_a_scale_that_is_applied_twice_or_an_epsilon_that_is_missing_is_found() -> None:
    x, weight, eps = _inputs()
    small = (x * 1e-3, weight, eps)
    assert _failed(lambda x, w, e: reference.rms_linear(x, w, 0.0), small) == ["parity"]
    twice = lambda x, w, e: reference.rms_linear(x, w, e) * torch.rsqrt(x.square().mean(-1, keepdim=True) + e)  # noqa: E731
    assert _failed(twice, (x, weight, eps)) == ["parity"]


def test_bits_that_change_are_found() -> None:
    calls = iter(range(1000))

    def noisy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_linear(x, weight, eps) * (1 + 1e-6 * next(calls))

    assert _failed(noisy, _inputs()) == ["determinism"]


def test_what_has_no_rows_is_refused() -> None:
    with pytest.raises(ShapeError, match="the first input must be x"):
        operation_battery(torch.add, (1.0, torch.ones(3)))
    with pytest.raises(ShapeError, match="x has 5 rows"):
        operation_battery(lambda x, *_: x.sum(), _inputs())


def test_excess_counts_half_of_the_digits_and_what_is_no_number() -> None:
    exact = torch.ones(3, 8)
    assert excess(exact * (1 + 2**-13), exact) == pytest.approx(0.5)
    assert excess(torch.full((3, 8), float("nan")), exact) == float("inf")
    assert excess(torch.full((3, 8), float("inf")), torch.full((3, 8), float("inf"))) == 0
