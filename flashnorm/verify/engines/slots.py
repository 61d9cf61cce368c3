"""A slot program as an engine: its steps against what the model that it was made from computes afresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashnorm.errors import Refusal
from flashnorm.runtime.decode.slots import Slots
from flashnorm.verify.engines.engine import Begin, Engine


def slots_engine(slots: Slots, model: Engine, name: str = "", eager: Slots | None = None) -> Engine:
    """`slots` decoded, `model` asked afresh and exactly: the two hold the same weights.

    `eager`: where steps of `slots` are captured graphs, slots of the same program without. All slots must be free; the
    battery frees those that it takes. Raises `Refusal` where they are not.
    """
    if len(slots.free_slots()) < slots.slots:
        raise Refusal("some slots hold sequences; the battery needs all of them free")
    return replace(
        model,
        name=name or model.name,
        begin=_begin(slots),
        eager=None if eager is None else _begin(eager),
        slots=slots,
        limit=min(model.limit, slots.max_length),
        chunks=False,
    )


def _begin(slots: Slots) -> Begin:
    return lambda rows: SlotsDecoding(slots, slots.free_slots()[:rows], rows)


class SlotsDecoding:
    """Rows in slots: the first `extend` is each one's prefill, later ones decode token by token."""

    def __init__(self, slots: Slots, places: Sequence[int], rows: int) -> None:
        if len(places) < rows:
            raise Refusal(f"{rows} sequences at once were asked for, and {len(places)} slots are free")
        self._slots, self._places = slots, tuple(places)
        self._held: set[int] = set()

    def extend(self, ids: Tensor) -> Tensor:
        if not self._held:
            self._held.update(self._places)
            return torch.stack([self._slots.prefill(s, row) for s, row in zip(self._places, ids, strict=True)])[:, None]
        for column in ids.T.tolist():
            last = self._slots.decode(dict(zip(self._places, column, strict=True)))
        return last.clone()[:, None]  # a step may leave its logits where the next one writes

    def close(self) -> None:
        for slot in self._held:
            self._slots.free(slot)
        self._held.clear()
