"""Batch invariance: a sequence's logits do not depend on the company it keeps.

Each way of asking gives one right answer more to the same question, so all of them may differ by rounding only
(`flashnorm.verify.rounding`): the kernels of a batch add in another order than those of one row.

The ways: each row alone and in the batch; with other neighbours; in another order; padded on the left and on the right;
decoded step by step among the others. Rows have different contents throughout, so that reading a
neighbour's row cannot go unnoticed, and there is an odd number of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.rounding import Rounding, distance_check

ROWS = 3
_STEPS = 8


def check_batching(engine: Engine, ids: Tensor, rounding: Rounding) -> Outcome:
    """`ids`: (count,); `ROWS` rows are cut from it."""
    rows = ids[: len(ids) - len(ids) % ROWS].view(ROWS, -1)
    alone = torch.cat([engine.fresh(row[None]) for row in rows]).cpu()
    notes: list[str] = []
    figures = [_figure(way, answer, alone, first, rounding) for way, answer, first in _ways(engine, rows, notes)]
    return Outcome("batching", tuple(figures), notes=tuple(notes))


def _ways(engine: Engine, rows: Tensor, notes: list[str]) -> Iterator[tuple[str, Tensor, int]]:
    """Each way's name, its logits (ROWS, positions, vocabulary), and the position that they start at."""
    yield "among others", engine.fresh(rows).cpu(), 0
    yield "with other neighbours", _with_strangers(engine, rows), 0
    yield "in another order", engine.fresh(rows.flip(0)).cpu().flip(0), 0
    if engine.padded is not None:
        for side in ("left", "right"):
            yield f"padded on the {side}", _padded(engine, rows, side), 0
    else:
        notes.append("not tried with padding: the engine takes no mask")
    if engine.begin is not None:
        start = rows.shape[1] - _STEPS - 1
        yield "decoded among others", _decoded(engine, rows, start + 1), start
    else:
        notes.append(f"not decoded in a batch: {engine.undecodable}")


def _with_strangers(engine: Engine, rows: Tensor) -> Tensor:
    """Each row in its place while all others hold other tokens."""
    answers = []
    for i in range(len(rows)):
        batch = (rows + 1) % engine.vocabulary
        batch[i] = rows[i]
        answers.append(engine.fresh(batch)[i].cpu())
    return torch.stack(answers)


def _padded(engine: Engine, rows: Tensor, side: str) -> Tensor:
    """Each row padded by an odd number of tokens of its own while its neighbours fill the whole width."""
    assert engine.padded is not None
    length = rows.shape[1]
    answers = []
    for i in range(len(rows)):  # row i is the one that is padded; its neighbours are full
        pads = 2 * i + 1
        batch = torch.cat([rows, rows[:, :pads]], dim=1)
        mask = torch.ones_like(batch)
        real = slice(pads, None) if side == "left" else slice(0, length)
        batch[i, real] = rows[i]
        mask[i] = 0
        mask[i, real] = 1
        answers.append(engine.padded(batch, mask)[i, real].cpu())
    return torch.stack(answers)


def _decoded(engine: Engine, rows: Tensor, prompt: int) -> Tensor:
    assert engine.begin is not None
    decoding = engine.begin(len(rows))
    try:
        parts = [decoding.extend(rows[:, :prompt])[:, -1:].cpu()]
        parts += [decoding.extend(rows[:, n : n + 1])[:, -1:].cpu() for n in range(prompt, rows.shape[1])]
    finally:
        decoding.close()
    return torch.cat(parts, dim=1)


def _figure(way: str, answer: Tensor, alone: Tensor, first: int, rounding: Rounding) -> Check:
    length = answer.shape[1]
    squares = squared_drift(answer.flatten(0, 1), alone[:, first : first + length].flatten(0, 1))

    def words(index: int, times: float) -> str:
        return (
            f"row {index // length} {way} has other logits than alone, by {times:.3g} times what rounding explains, at "
            f"position {first + index % length}"
        )

    return distance_check(f"another_answer ({way})", squares, rounding, words, everywhere=True)
