"""Two ways to the next token: on the device, one step ahead of the host; or by Transformers' processors on logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashnorm.errors import Refusal
from flashnorm.runtime.decode.sampling import Sampling
from flashnorm.runtime.decode.slots import Slots

# Processor -> its attribute and the field of `Sampling`, in the order in which the device applies them.
_ON_DEVICE: dict[type[LogitsProcessor], tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}


def device_sampling(processors: Sequence[Any], do_sample: bool, padding: str) -> Sampling | None:
    """The processors as settings of the device; None where they are others, or in another order, or beyond its range.

    `padding`: "none", "left" or "other". The device's repetition penalty does not see padding.
    """
    order = [list(_ON_DEVICE).index(type(p)) if type(p) in _ON_DEVICE else -1 for p in processors]
    if -1 in order or order != sorted(set(order)):
        return None
    fields: dict[str, Any] = {"temperature": 1.0} if do_sample else {}
    for processor in processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and not _skips(processor, padding):
            return None
        if getattr(processor, "filter_value", -torch.inf) != -torch.inf:
            return None
        attribute, field = _ON_DEVICE[type(processor)]
        fields[field] = getattr(processor, attribute)
    try:
        return Sampling(**fields)
    except Refusal:  # Transformers takes more, such as a top-p of 0
        return None


def _skips(penalty: RepetitionPenaltyLogitsProcessor, padding: str) -> bool:
    """Whether the stock penalty leaves the padding out; older versions of Transformers penalise the pad token."""
    return padding == "none" or (padding == "left" and getattr(penalty, "prompt_ignore_length", None) is not None)


class Chooser(Protocol):
    """Chooses the tokens of the rows of a batch."""

    def enter(self, places: dict[int, int], prompts: Sequence[Tensor]) -> None:
        """Prefill a wave. `places`: row -> slot, in the order of `prompts`."""

    def choose(self, position: int, rows: Sequence[int], *, last: bool) -> list[int]:
        """The tokens of `rows` at `position` of the batch; `last`: no further step of this wave will be asked for.

        `rows`: those of the wave, or fewer than at the step before.
        """


class ByDevice:
    """The device chooses and goes on with what it chose, while the host still looks at the token before.

    A row that turns out to be finished has been fed one token too many, which its slot forgets.
    """

    def __init__(self, slots: Slots, sampling: Sampling, rows: int) -> None:
        self._slots, self._sampling = slots, sampling
        # Nothing is drawn from torch's generator for greedy text, as in Transformers.
        drawn = (
            torch.randint(2**63 - 1, (rows,), device="cpu") if sampling.temperature else torch.zeros(rows, device="cpu")
        )
        self._seeds = [int(seed) for seed in drawn.tolist()]
        self._places: dict[int, int] = {}
        self._rows: list[int] = []
        self._tokens = torch.empty(0, device="cpu")

    def enter(self, places: dict[int, int], prompts: Sequence[Tensor]) -> None:
        self._places, self._rows = places, list(places)
        for (row, slot), prompt in zip(places.items(), prompts, strict=True):
            self._slots.prefill(slot, prompt, replace(self._sampling, seed=self._seeds[row]))
        self._tokens = self._slots.chosen(list(places.values()))

    def choose(self, position: int, rows: Sequence[int], *, last: bool) -> list[int]:
        arriving, order = _Arriving(self._tokens), self._rows
        if not last:
            self._rows = list(rows)
            self._tokens = self._slots.advance([self._places[row] for row in rows])
        tokens = dict(zip(order, arriving.wait(), strict=True))
        return [tokens[row] for row in rows]


class _Arriving:
    """Tokens on their way to the host, queued before whatever the device is given next."""

    def __init__(self, tokens: Tensor) -> None:
        self._host, self._copied = tokens, None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tokens.device))
        else:
            self._host = tokens.clone()  # the slots may choose the next tokens in place

    def wait(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


class ByProcessors:
    """Transformers' own processors on the logits of each step, for everything that the device does not know.

    `ids`: (rows, max_length) on the host, filled up to the position that is chosen. Processors see all rows, since
    some hold one setting per row; those of other waves have logits of zero. `scores`, `logits`: what the processors
    returned and were given, a tensor (rows, vocabulary) per step, where `keeps` is set.
    """

    def __init__(self, slots: Slots, processors: Any, do_sample: bool, ids: Tensor, keeps: bool) -> None:
        self._slots, self._processors, self._do_sample, self._ids, self._keeps = (
            slots,
            processors,
            do_sample,
            ids,
            keeps,
        )
        self._places: dict[int, int] = {}
        self._prefilled: Tensor | None = None
        self.scores: list[Tensor] = []
        self.logits: list[Tensor] = []

    def enter(self, places: dict[int, int], prompts: Sequence[Tensor]) -> None:
        self._places = places
        filled = zip(places.values(), prompts, strict=True)
        # Cloned, since the slots may use one buffer for the logits of every prefill.
        self._prefilled = torch.stack([self._slots.prefill(slot, prompt).clone() for slot, prompt in filled])

    def choose(self, position: int, rows: Sequence[int], *, last: bool) -> list[int]:
        here = self._step(position, rows)
        logits = here.new_zeros(len(self._ids), here.shape[-1], dtype=torch.float32)
        logits[list(rows)] = here.float()
        scores = self._processors(self._ids[:, :position].to(logits.device), logits)
        if self._keeps:
            self.scores.append(scores)
            self.logits.append(logits)
        if self._do_sample:  # over all rows, as in Transformers, so that the same seed gives the same draws
            tokens = torch.multinomial(torch.softmax(scores, -1), num_samples=1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        return tokens[list(rows)].tolist()

    def _step(self, position: int, rows: Sequence[int]) -> Tensor:
        """The logits (rows, vocabulary) that choose the token at `position`."""
        if self._prefilled is not None:
            prefilled, self._prefilled = self._prefilled, None
            return prefilled
        fed = self._ids[list(rows), position - 1].tolist()
        return self._slots.decode({self._places[row]: token for row, token in zip(rows, fed, strict=True)})
