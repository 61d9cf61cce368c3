"""Determinism: the same question has the same answer, bit for bit.

No bound but equality: one build on one machine with one shape runs one order of additions. What differs from run to
run reads something it should not: memory that nobody wrote, a buffer that another stream still writes, sums whose
order depends on which block finishes first. Each question is repeated, the last repeats while the machine is busy with
other work (another thread, and on a CUDA device another stream), which moves every race.

A captured graph launches the very kernels that were launched while it was captured, with the same shapes and in the
same order. So its replay gives the bits of the same steps launched one by one, unless something that changes from step
to step was captured as it was then: a number from the host, the address of a tensor that is made anew. Every replay
repeats such a mistake alike, so that repeats do not show it, and replay is compared with eager.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.lag import PROMPT, decode_steps
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

# The other work's products, queued at once: so wide, and so many. On a GPU wide enough for all of its multiprocessors,
# and some milliseconds of them, so that the wait between two rounds hardly counts.
_WIDTH = {"cpu": 256, "cuda": 2048}
_QUEUED = {"cpu": 1, "cuda": 8}
_STEPS = 16


def check_determinism(engine: Engine, ids: Tensor, repeats: int) -> Outcome:
    """`ids`: (count,); `repeats` of each question, the second half of them under load."""
    figures = [_figure("prefill", [engine.fresh(ids[None])[0].cpu() for _ in _runs(engine, ids, repeats)])]
    notes: tuple[str, ...] = ()
    if engine.begin is not None:
        some = ids[: PROMPT + _STEPS]
        steps = [decode_steps(engine, some, PROMPT) for _ in _runs(engine, ids, repeats)]
        figures.append(_figure("decode", steps))
        if engine.eager is not None:
            figures.append(_replay_figure(steps[0], decode_steps(replace(engine, begin=engine.eager), some, PROMPT)))
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
    """Matrix products without end in another thread, on a stream of their own where there are streams.

    The first of them are queued before the block begins.
    """
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        try:
            with own_stream(device) as wait:
                width = _WIDTH.get(device.type, _WIDTH["cpu"])
                square = torch.ones(width, width, device=device)
                while not done.is_set():
                    for _ in range(_QUEUED.get(device.type, 1)):
                        square = (square @ square).clamp(-1, 1)
                    begun.set()
                    wait()
        finally:
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def own_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    """A new stream is current while the block runs; yields what waits for it, or a queue would grow without end."""
    if device.type != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream.synchronize


def _figure(way: str, answers: list[Tensor]) -> Check:
    first, *others = answers
    wrong = [i for i, answer in enumerate(others, start=1) if not same_bits(first, answer)]
    shown = ""
    if wrong:
        shown = (
            f"{way}: run {wrong[0]} of {len(answers)} gave other bits than the first "
            f"{_where(first, others[wrong[0] - 1])}: something reads what is not there yet, or adds in an order that "
            "changes"
        )
    return Check(f"other_bits ({way})", len(wrong), 0, shown)


def _replay_figure(replayed: Tensor, eager: Tensor) -> Check:
    """Both: logits (steps, vocabulary). The figure counts steps."""
    wrong = int(_rows(replayed, eager).sum())
    shown = (
        f"replayed graphs give other bits than the same steps launched one by one {_where(replayed, eager)}: the "
        "capture holds something that changes from step to step"
        if wrong
        else ""
    )
    return Check("other_bits (replay against eager)", wrong, 0, shown)


def _where(one: Tensor, other: Tensor) -> str:
    rows = _rows(one, other)
    return f"at {int(rows.sum())} of {len(rows)} positions, from {int(rows.nonzero()[0])} on"


def _rows(one: Tensor, other: Tensor) -> Tensor:
    """(positions,) bool: where the bits differ."""
    return (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).any(-1)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN equals itself here: a NaN in every run is no question of determinism."""
    return one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
