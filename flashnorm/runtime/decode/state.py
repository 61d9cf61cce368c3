"""What a step reads and writes besides weights and cache, in device memory: one entry per slot."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.runtime.decode.sampling import Sampling, SamplingTable
from flashnorm.runtime.decode.step import SettlingStep, Step


class State:
    """`lengths` and `chosen`: (slots + 1,) int64; the last entry belongs to the rows that fill a bucket up."""

    def __init__(self, slots: int, device: torch.device, table: SamplingTable) -> None:
        self.spare = slots
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._table = table

    def start(self, slot: int, tokens: Tensor, logits: Tensor, sampling: Sampling) -> None:
        """A sequence of `tokens` (tokens,) whose next token is chosen from `logits` (vocabulary,)."""
        self._table.set(slot, sampling)
        self._table.seen[slot, tokens] = True
        self.lengths[slot] = len(tokens)
        slots = self.lengths.new_full((1,), slot)
        self.chosen[slot] = self._next(logits[None], slots, self.lengths[slots], greedy=sampling.greedy)[0]

    def choose_instead(self, slots: tuple[int, ...], tokens: Tensor) -> None:
        """Let the next step append these `tokens` (rows,)."""
        self.chosen[list(slots)] = tokens.to(self.chosen.device)

    def step(self, step: Step, slots: Tensor, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Append each slot's chosen token and choose the next. Returns logits (rows, vocabulary) and tokens (rows,).

        Reads and writes device memory only, the same at every call, so that it can be captured.
        """
        if greedy and isinstance(step, SettlingStep):
            following = torch.empty_like(slots)
            return step.settled(slots, self.chosen, self.lengths, following, spare=self.spare), following
        logits = step(slots, self.chosen, self.lengths)
        if not greedy:
            self._table.see(slots, self.chosen[slots])
        lengths = self.lengths[slots] + 1
        following = self._next(logits, slots, lengths, greedy=greedy)
        self.chosen[slots] = following
        self.lengths[slots] = lengths
        self.lengths[self.spare :].zero_()
        return logits, following

    def _next(self, logits: Tensor, slots: Tensor, positions: Tensor, *, greedy: bool) -> Tensor:
        return logits.argmax(-1) if greedy else self._table.choose(logits, slots, positions)
