"""What a server or `generate` needs from a decode program: sequences that join and leave between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from flashnorm.runtime.decode.sampling import Sampling


class Slots(Protocol):
    """Places for sequences in a preallocated cache. A slot holds one sequence from its prefill until it is freed.

    Slots are numbered from 0 to `slots - 1`. Everything raises `CapacityError`, with nothing changed, where a slot
    does not exist, is taken or is empty, or where a sequence would grow beyond `max_length`; and `Refusal` for slots or
    tokens that are no whole numbers, or tokens beyond the vocabulary. Nothing waits for the device: tensors come back
    as soon as their computation is queued. One thread at a time may call.
    """

    @property
    def slots(self) -> int:
        """How many sequences fit at once."""

    @property
    def max_length(self) -> int:
        """How many tokens one sequence may hold, prompt included."""

    def free_slots(self) -> tuple[int, ...]:
        """The slots that hold no sequence, in order."""

    def length(self, slot: int) -> int:
        """How many tokens of the slot's sequence lie in the cache."""

    def prefill(self, slot: int, ids: Sequence[int] | Tensor, sampling: Sampling = ...) -> Tensor:
        """Start a sequence with its prompt (at least one token), and choose its first new token.

        Returns the logits (vocabulary,) in fp32 after the prompt's last token. `sampling` says how `advance` and this
        call choose the sequence's tokens. A long prompt runs in chunks.
        """

    def decode(self, tokens: Mapping[int, int]) -> Tensor:
        """Append one given token to each named slot; the logits (rows, vocabulary) in fp32, in the mapping's order.

        The token that `advance` feeds next is chosen from these logits.
        """

    def advance(self, active: Sequence[int]) -> Tensor:
        """Append to each slot the token chosen last, and choose the next one; all of it stays on the device.

        Returns the chosen tokens (rows,) int64, in the order of `active`: those that the next `advance` will append.
        """

    def chosen(self, slots: Sequence[int]) -> Tensor:
        """The tokens (rows,) int64 that were chosen last and are not in the cache yet."""

    def free(self, slot: int) -> None:
        """Give the slot back; the sequence is forgotten."""
