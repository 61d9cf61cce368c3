"""Determinism: the same question has the same answer, bit for bit.

No bound but equality: one build on one machine with one shape runs one order of additions. What differs from run to
run reads something it should not: memory that nobody wrote, a buffer that another stream still writes, sums whose
order depends on which block finishes first. Each question is repeated, the last repeats while the machine is busy with
other work (another thread, and on a CUDA device another stream), which moves every race.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.lag import PROMPT, decode_steps
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

_LOAD = 256  # rows and columns of the other work's products
_STEPS = 16


def check_determinism(engine: Engine, ids: Tensor, repeats: int) -> Outcome:
    """`ids`: (count,); `repeats` of each question, the second half of them under load."""
    figures = [_figure("prefill", [engine.fresh(ids[None])[0].cpu() for _ in _runs(engine, ids, repeats)])]
    notes: tuple[str, ...] = ()
    if engine.begin is not None:
        some = ids[: PROMPT + _STEPS]
        figures.append(_figure("decode", [decode_steps(engine, some, PROMPT) for _ in _runs(engine, ids, repeats)]))
    else:
        notes = (f"{engine.name} cannot decode: {engine.undecodable}",)
    return Outcome("determinism", tuple(figures), notes=notes)


def _runs(engine: Engine, ids: Tensor, repeats: int) -> Iterator[int]:
    device = engine.fresh(ids[None, :1]).device
    quiet = (repeats + 1) // 2
    yield from range(quiet)
    with busy(device):
        yield from range(quiet, repeats)


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Matrix products without end in another thread, on a stream of their own where there are streams."""
    done = threading.Event()

    def work() -> None:
        on = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else None
        if on is not None:
            on.__enter__()
        square = torch.ones(_LOAD, _LOAD, device=device)
        while not done.is_set():
            square = (square @ square).clamp(-1, 1)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # or the queue would grow without end

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _figure(way: str, answers: list[Tensor]) -> Check:
    first, *others = answers
    wrong = [i for i, answer in enumerate(others, start=1) if not same_bits(first, answer)]
    shown = ""
    if wrong:
        rows = (first.contiguous().view(torch.uint8) != others[wrong[0] - 1].contiguous().view(torch.uint8)).any(-1)
        shown = (
            f"{way}: run {wrong[0]} of {len(answers)} gave other bits than the first at {int(rows.sum())} of "
            f"{len(rows)} positions, from {int(rows.nonzero()[0])} on: something reads what is not there yet, or adds "
            "in an order that changes"
        )
    return Check(f"other_bits ({way})", len(wrong), 0, shown)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals itself here: a NaN in every run is no question of determinism."""
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
