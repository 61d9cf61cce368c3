"""The battery for one operation: y = f(x, ...), a kernel or what calls several, before any model uses it.

`x`: (rows, ...), the first tensor of the inputs; y has as many rows. Every right answer to one question agrees with
every other to half of the dtype's digits, the least that a stable computation keeps (Higham, Accuracy and Stability of
Numerical Algorithms, 1.7); what reads another row's, another call's or nobody's memory is off by the size of values.

- *parity*: the result against a reference's, at the inputs given.
- *lag*: calls with one x and then another one. A call's result must not depend on the call before it.
- *batching*: each row alone, and with all other rows replaced.
- *determinism*: the same call again, under load as well, bit for bit.
- *races*: see `flashnorm.verify.races.check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashnorm.errors import Refusal, ShapeError
from flashnorm.verify.determinism import busy, same_bits
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.races.check import check_races
from flashnorm.verify.report import Check
from flashnorm.verify.subject import refusing

Inputs = Sequence[Tensor | float]
Operation = Callable[..., Tensor]
_REPEATS = 4


def operation_battery(
    operation: Operation, inputs: Inputs, reference: Operation | None = None, *, name: str = "operation"
) -> BatteryReport:
    """Every check of `operation(*inputs)`. `reference`: what it should compute, in any precision; for parity.

    `inputs`: tensors and numbers, of which the first is x. Raises `ShapeError` where the first is no tensor with rows,
    or the result has another number of them.
    """
    x = inputs[0]
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise ShapeError("the first input must be x, a tensor whose first axis are rows")
    result = operation(*inputs)
    if not isinstance(result, Tensor) or result.dim() < 1 or len(result) != len(x):
        raise ShapeError(f"x has {len(x)} rows, and the result must be a tensor with as many")
    checks: list[Callable[[], Outcome]] = [
        lambda: _parity(operation, inputs, reference),
        lambda: _lag(operation, inputs),
        lambda: _batching(operation, inputs),
        lambda: _determinism(operation, inputs),
        lambda: _races(operation, inputs, reference),
    ]
    return BatteryReport(name, "operation", tuple(map(_timed, checks)))


def _timed(check: Callable[[], Outcome]) -> Outcome:
    start = time.monotonic()
    outcome = check()
    return replace(outcome, seconds=time.monotonic() - start)


def excess(result: Tensor, expected: Tensor) -> float:
    """The distance of two results in units of what half of the digits allow, row by row the largest.

    Infinite where a number is none that the expected one is not.
    """
    unit = torch.finfo(expected.dtype).eps / 2
    one, other = (t.detach().double().reshape(len(t), -1) for t in (result, expected))
    error = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one - other).norm(dim=-1)
    size = other.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    return float((error / (unit**0.5 * size)).nan_to_num(torch.inf).max())


def _parity(operation: Operation, inputs: Inputs, reference: Operation | None) -> Outcome:
    if reference is None:
        return Outcome("parity", skipped="there is no reference to compare with")
    result, expected = operation(*inputs), reference(*inputs)
    value = excess(result, expected.to(result.dtype))
    words = f"the result differs from the reference's by {value:.3g} times what half of its digits allow"
    return Outcome("parity", (Check("reference_distance", value, 1.0, words),))


def _lag(operation: Operation, inputs: Inputs) -> Outcome:
    """x, then another one, then that again: the last two have the same answer, unless the first call left something."""
    others = _with_x(inputs, _other(inputs[0]))
    operation(*inputs)
    after_another, after_itself = operation(*others).clone(), operation(*others).clone()
    value = excess(after_another, after_itself)
    words = (
        f"a call's result depends on the call before it, by {value:.3g} times what half of the digits allow: it reads "
        "a buffer that the call before left"
    )
    return Outcome("lag", (Check("history", value, 1.0, words),))


def _batching(operation: Operation, inputs: Inputs) -> Outcome:
    x = inputs[0]
    assert isinstance(x, Tensor)
    together = operation(*inputs).clone()
    alone, strangers = [], []
    for i in range(len(x)):
        alone.append(excess(operation(*_with_x(inputs, x[i : i + 1].clone())), together[i : i + 1]))
        mixed = _other(x).clone()
        mixed[i] = x[i]
        strangers.append(excess(operation(*_with_x(inputs, mixed))[i : i + 1], together[i : i + 1]))
    figures = []
    for way, values in (("alone", alone), ("with other neighbours", strangers)):
        worst = max(range(len(values)), key=values.__getitem__)
        words = f"row {worst} {way} has another result, by {values[worst]:.3g} times what half of the digits allow"
        figures.append(Check(f"another_answer ({way})", values[worst], 1.0, words))
    return Outcome("batching", tuple(figures))


def _determinism(operation: Operation, inputs: Inputs) -> Outcome:
    x = inputs[0]
    assert isinstance(x, Tensor)
    first = operation(*inputs).clone()
    quiet = [operation(*inputs).clone() for _ in range(_REPEATS // 2)]
    with busy(x.device):
        loaded = [operation(*inputs).clone() for _ in range(_REPEATS // 2)]
    wrong = sum(not same_bits(first, result) for result in (*quiet, *loaded))
    return Outcome("determinism", (Check("other_bits", wrong, 0, f"{wrong} of {_REPEATS} repeats gave other bits"),))


def _races(operation: Operation, inputs: Inputs, reference: Operation | None) -> Outcome:
    """Skipped where the operation does not run on fake CUDA tensors, as one that holds tensors or streams elsewhere."""
    try:
        with refusing("the operation cannot be played on fake CUDA tensors"):
            return check_races(operation, inputs, reference)
    except Refusal as reason:
        return Outcome("races", skipped=str(reason))


def _with_x(inputs: Inputs, x: Tensor) -> list[Tensor | float]:
    return [x, *inputs[1:]]


def _other(x: Tensor | float) -> Tensor:
    """Rows of other values and another size than x has, none of which is another row of x."""
    assert isinstance(x, Tensor)
    return x.flip(-1) * -3
