"""Causality: changing token t must not change any logits before t.

Rows of one batch hold the same tokens but for one each, at t. Up to t - 1 all rows have read the same, so their logits
there are two right answers to one question and may differ by rounding only (`flashnorm.verify.rounding`; mostly they
are equal bit for bit, since rows of one shape are computed in one order). From t on they must differ somewhere, or the
check would pass for an engine that ignores its input: that is the second figure.

The places t lie next to the powers of two up to the length, where tiles of kernels begin and end, at the edges of a
sliding window, and at the last token. The ways of asking: all tokens at once; in chunks against a cache; in a batch
padded on the left, where the padding's own ids must not count either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.rounding import Rounding, distance_check

_PADDING = 5
_CHUNKS = 3


@dataclass(frozen=True)
class _Probe:
    """A batch (1 + places, length): the tokens as they are, then with each place changed; and how it was answered."""

    way: str
    places: list[int]
    logits: Tensor  # (rows, length, vocabulary)


def check_causality(engine: Engine, ids: Tensor, rounding: Rounding, most: int = 12) -> Outcome:
    """`ids`: (length,), `most`: how many places are tried. A token is changed to the next id of the vocabulary."""
    places = change_places(len(ids), engine.window, most)
    batch = changed(ids, places, engine.vocabulary)
    figures: list[Check] = []
    notes: list[str] = []
    for probe in _ways(engine, batch, places, notes):
        figures += [_earlier(probe, rounding), _heard(probe, rounding)]
    return Outcome("causality", tuple(figures), notes=tuple(notes))


def change_places(length: int, window: int | None, most: int) -> list[int]:
    """At most `most` places, the last one included, those next to powers of two and to the window's edge first."""
    edges = [length - 1, length // 2]
    edges += [window + offset for offset in (0, 1) if window]
    powers = [1 << k for k in range(length.bit_length() + 1)][::-1]
    edges += [power + offset for offset in (0, -1) for power in powers]
    inside = [place for place in dict.fromkeys(edges) if 0 < place < length]
    return sorted(inside[:most])


def changed(ids: Tensor, places: list[int], vocabulary: int) -> Tensor:
    """(1 + places, length): `ids`, and a row for each place with another token there."""
    batch = ids.repeat(1 + len(places), 1)
    for row, place in enumerate(places, start=1):
        batch[row, place] = (batch[row, place] + 1) % vocabulary
    return batch


def _ways(engine: Engine, batch: Tensor, places: list[int], notes: list[str]) -> Iterator[_Probe]:
    yield _Probe("prefill", places, engine.fresh(batch).cpu())
    if engine.begin is not None and engine.chunks:
        yield _Probe("chunked prefill", places, _in_chunks(engine, batch))
    else:
        notes.append("not tried in chunks: the engine does not give the logits of every token of a chunk")
    if engine.padded is not None:
        yield _Probe("padded", places, _with_padding(engine, batch))
    else:
        notes.append("not tried with padding: the engine takes no mask")


def _in_chunks(engine: Engine, batch: Tensor) -> Tensor:
    assert engine.begin is not None
    decoding = engine.begin(len(batch))
    try:
        return torch.cat([decoding.extend(part).cpu() for part in batch.chunk(_CHUNKS, dim=1)], dim=1)
    finally:
        decoding.close()


def _with_padding(engine: Engine, batch: Tensor) -> Tensor:
    """Left padding with another id in every row: what stands there must count for nothing."""
    assert engine.padded is not None
    pads = torch.arange(len(batch))[:, None].expand(-1, _PADDING) % engine.vocabulary
    mask = torch.ones(len(batch), _PADDING + batch.shape[1], dtype=torch.int64)
    mask[:, :_PADDING] = 0
    return engine.padded(torch.cat([pads, batch], dim=1), mask)[:, _PADDING:].cpu()


def _earlier(probe: _Probe, rounding: Rounding) -> Check:
    """No change reaches back."""
    where = [(t, p) for t in probe.places for p in range(t)]
    parts = [squared_drift(row[:t], probe.logits[0, :t]) for t, row in zip(probe.places, probe.logits[1:], strict=True)]

    def words(index: int, times: float) -> str:
        t, p = where[index]
        return (
            f"{probe.way}: changing token {t} changed the logits at position {p}, before it, by {times:.3g} times what "
            f"rounding explains: position {p} sees the future"
        )

    return distance_check(f"future_seen ({probe.way})", torch.cat(parts), rounding, words)


def _heard(probe: _Probe, rounding: Rounding) -> Check:
    """Every change is heard from its place on."""
    deaf = [
        t
        for t, row in zip(probe.places, probe.logits[1:], strict=True)
        if float(squared_drift(row[t:], probe.logits[0, t:]).max()) <= rounding.allowed**2
    ]
    shown = f"{probe.way}: changing token {deaf[0]} changed no logits at or after it" if deaf else ""
    return Check(f"changes_unheard ({probe.way})", len(deaf), 0, shown)
