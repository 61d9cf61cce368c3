"""Races of one operation: by logic on any machine, and on a GPU by widening every window."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.verify.outcome import Outcome
from flashnorm.verify.races.capture import NotCaptured, capture
from flashnorm.verify.races.delays import Side, delayed, sides_of, spinning
from flashnorm.verify.races.graphs import captured, unjoined
from flashnorm.verify.races.recorder import find_races
from flashnorm.verify.report import Check

Operation = Callable[..., Tensor]
_CALLS = 3
_WIDER = 20.0  # times the operation's own time, and no less than _LEAST
_LEAST = 200.0  # microseconds: longer than any wait that the host itself makes


def check_races(operation: Operation, inputs: Sequence[Tensor | float], reference: Operation | None = None) -> Outcome:
    """Whether every access of `operation(*inputs)` is ordered.

    `inputs`: tensors and numbers. On CUDA tensors the operation also runs with delays in either side, eager and
    captured, in poisoned memory, and each result is compared with `reference(*inputs)` (default: the operation itself,
    alone and in order, which hides a race that always happens). From call to call the first tensor is doubled, so that
    what a call before left behind is never right by chance: a read of what is not there yet finds NaN or another call's
    values, and the result is off by far more than the square root of the dtype's unit roundoff, the least that any
    stable computation keeps (see `flashnorm.verify.rounding.estimated`). A capture that CUDA refuses because a stream
    is not joined, or waits for what is not captured, fails the check; one refused for another reason is a note.
    """
    races = find_races(operation, inputs, calls=_CALLS)
    shown = f"{races[0]}" + (f" (and {len(races) - 1} more pairs)" if len(races) > 1 else "") if races else ""
    figures = [Check("unordered_pairs", len(races), 0, shown)]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if not tensors or tensors[0].device.type != "cuda":
        note = "no GPU took part: the order of streams and events was checked, not how the device runs them"
        return Outcome("races", tuple(figures), notes=(note,))
    return _on_device(operation, inputs, reference or operation, figures)


def _on_device(
    operation: Operation, inputs: Sequence[Tensor | float], reference: Operation, figures: list[Check]
) -> Outcome:
    """`figures` and those of the runs. Eager ones come first: an event may be waited for only where it was recorded."""
    variants = _variants(inputs)
    expected = _expected(reference, variants)
    spin = spinning(max(_LEAST, _WIDER * _microseconds(operation, variants[0])))
    sides = sides_of(lambda: operation(*variants[0]))
    trials = [_eager(operation, variants, expected, side, spin) for side in sides]
    loose, note = "", ""
    try:
        trials += [_captured(operation, variants, expected, side, spin) for side in sides]
        nodes = unjoined(captured(lambda: operation(*inputs)))
        loose = f"nothing in the captured graph waits for {nodes[0]}" if nodes else ""
    except NotCaptured as reason:
        loose = f"the operation cannot be captured in a CUDA graph: {reason}" if reason.disorder else ""
        note = "" if reason.disorder else f"it was not captured, or not with either side delayed: {reason}"
    wrong = [trial for trial in trials if not trial.passed]
    meaning = f"{len(wrong)} of {len(trials)} runs were wrong: {wrong[0].words}" if wrong else ""
    figures.append(Check("wrong_when_delayed", len(wrong), 0, meaning))
    figures.append(Check("unjoined_in_graph", int(bool(loose)), 0, loose))
    return Outcome("races", tuple(figures), notes=(note,) if note else ())


@dataclass(frozen=True)
class _Trial:
    words: str
    passed: bool


def _variants(inputs: Sequence[Tensor | float]) -> list[list[Tensor | float]]:
    """One list of inputs for each call: the first tensor times 1, 2, 4, …, which no dtype rounds."""
    first = next(i for i, value in enumerate(inputs) if isinstance(value, Tensor))
    return [[value * 2**k if i == first else value for i, value in enumerate(inputs)] for k in range(_CALLS)]


def _expected(reference: Operation, variants: Sequence[Sequence[Tensor | float]]) -> list[Tensor]:
    results = []
    for inputs in variants:
        results.append(reference(*inputs).clone())
        torch.cuda.synchronize()
    return results


def _eager(
    operation: Operation,
    variants: Sequence[Sequence[Tensor | float]],
    expected: Sequence[Tensor],
    side: Side,
    spin: Callable[[], None],
) -> _Trial:
    poison(expected[0])
    with delayed(side, spin):
        results = [operation(*inputs) for inputs in variants]  # one after the other, as a loop does
        torch.cuda.synchronize()
    return _Trial(f"eager, {side} delayed", _all_agree(results, expected))


def _captured(
    operation: Operation,
    variants: Sequence[Sequence[Tensor | float]],
    expected: Sequence[Tensor],
    side: Side,
    spin: Callable[[], None],
) -> _Trial:
    results = _replayed(operation, variants, side, spin)
    return _Trial(f"captured, {side} delayed", _all_agree(results, expected))


def _replayed(
    operation: Operation, variants: Sequence[Sequence[Tensor | float]], side: Side, spin: Callable[[], None]
) -> list[Tensor]:
    """One capture, replayed with each call's inputs in its place."""
    static = [value.clone() if isinstance(value, Tensor) else value for value in variants[0]]
    graph, result = capture(lambda: operation(*static), delayed(side, spin))
    results = []
    for inputs in variants:
        for place, value in zip(static, inputs, strict=True):
            if isinstance(place, Tensor) and isinstance(value, Tensor):
                place.copy_(value)
        result.fill_(float("nan"))  # what a replay does not write in time stays so
        graph.replay()
        results.append(result.clone())
    torch.cuda.synchronize()
    return results


def _all_agree(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(agrees(result, exact) for result, exact in zip(results, expected, strict=True))


def poison(like: Tensor) -> None:
    """Fill memory that the allocator will hand out next, of `like`'s size and up to eight times that, with NaN."""
    for times in (1, 2, 4, 8):
        blocks = [torch.full((times * like.numel(),), float("nan"), device=like.device) for _ in range(4)]
        torch.cuda.synchronize()
        del blocks


def agrees(result: Tensor, expected: Tensor) -> bool:
    """Whether two results agree to half of their dtype's digits, without a NaN."""
    unit = torch.finfo(expected.dtype).eps / 2
    distance = (result.double() - expected.double()).norm()
    return bool(distance <= unit**0.5 * expected.double().norm())


def _microseconds(operation: Operation, inputs: Sequence[Tensor | float]) -> float:
    for _ in range(2):
        operation(*inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    operation(*inputs)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)
