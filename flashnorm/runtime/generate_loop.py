"""The decoding loop: prompts enter slots wave by wave, tokens fill the rows, and stopping criteria end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from flashnorm.errors import CapacityError, Refusal
from flashnorm.runtime.decode.slots import Slots
from flashnorm.runtime.generate_choosing import ByDevice, ByProcessors, Chooser, device_sampling


@dataclass(frozen=True)
class Prepared:
    """A call of `generate` as Transformers prepares it for its decoding loop."""

    input_ids: Tensor  # (rows, width)
    attention_mask: Tensor | None  # (rows, width), or None where there is no padding
    processors: Any  # LogitsProcessorList
    criteria: Any  # StoppingCriteriaList
    config: Any  # GenerationConfig, with its special tokens as tensors
    streamer: Any = None

    @property
    def width(self) -> int:
        return self.input_ids.shape[1]

    @property
    def new_tokens(self) -> int:
        return self.config.max_length - self.width

    @property
    def pads_finished(self) -> bool:
        """Whether a finished row is padded; otherwise, it goes on until all are finished."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    @property
    def keeps_logits(self) -> bool:
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))


def decode_on_slots(slots: Slots, call: Prepared) -> Tensor | GenerateDecoderOnlyOutput:
    """Run a prepared call. What Transformers' own loop returns, see `flashnorm.runtime.generate.generate`."""
    prompts = _prompts(call)
    _check_capacity(slots, call, prompts)
    ids = _canvas(call)
    chooser = _chooser(slots, call, prompts, ids)
    free, width = slots.free_slots(), call.width
    for start in range(0, len(prompts), len(free)):
        rows = range(start, min(start + len(free), len(prompts)))
        places = dict(zip(rows, free, strict=False))
        with _occupied(slots, tuple(places.values())):
            chooser.enter(places, [prompts[row] for row in rows])
            width = max(width, _run(call, chooser, ids, rows))
    if call.streamer is not None:
        call.streamer.end()
    sequences: Any = ids[:, :width].to(call.input_ids.device)
    if not call.config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **_kept_logits(call, chooser))


def _run(call: Prepared, chooser: Chooser, ids: Tensor, rows: Sequence[int]) -> int:
    """Fill the rows of one wave until all are finished; returns how wide they became."""
    unfinished = fed = list(rows)
    canvas, ended, pads = ids.numpy(), _ended(call, ids), call.pads_finished  # torch's indexing took 0.2 ms a step
    for position in range(call.width, call.config.max_length):
        tokens = dict(zip(fed, chooser.choose(position, fed, last=position + 1 == call.config.max_length), strict=True))
        for row in unfinished if pads else rows:
            canvas[row, position] = tokens[row]
        done = ended(position, tokens)
        unfinished = [row for row in unfinished if row not in done]
        if call.streamer is not None:
            call.streamer.put(ids[list(rows), position])
        if not unfinished:
            return position + 1
        if pads and not call.keeps_logits:
            fed = unfinished
    return call.config.max_length


def _ended(call: Prepared, ids: Tensor) -> Callable[[int, Mapping[int, int]], set[int]]:
    """A function of a position and the tokens there, row -> token: the rows which end with them.

    The host has a fraction of a millisecond for a step. So end-of-sequence tokens are looked up here, and Transformers'
    criteria, which compare tensors, run where there are others.
    """
    if {type(criterion) for criterion in call.criteria} <= {MaxLengthCriteria, EosTokenCriteria}:
        ends = {
            token
            for criterion in call.criteria
            if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id.tolist()
        }
        return lambda position, tokens: {row for row, token in tokens.items() if token in ends}

    def by_criteria(position: int, tokens: Mapping[int, int]) -> set[int]:
        done = call.criteria(ids[:, : position + 1], None)
        return {row for row in tokens if done[row]}

    return by_criteria


def _prompts(call: Prepared) -> list[Tensor]:
    """Each row's tokens (length,) on the host, without the padding."""
    ids = call.input_ids.cpu()
    if call.attention_mask is None:
        return list(ids)
    prompts = [row[kept] for row, kept in zip(ids, call.attention_mask.cpu() != 0, strict=True)]
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise Refusal(f"prompt {number} holds nothing but padding; give at least one token, such as the bos token")
    return prompts


def _check_capacity(slots: Slots, call: Prepared, prompts: Sequence[Tensor]) -> None:
    longest = max(len(prompt) for prompt in prompts)
    needed = longest + call.new_tokens - 1  # the last token is never fed
    if needed > slots.max_length:
        most = max(slots.max_length - longest + 1, 0)
        raise CapacityError(
            f"a prompt of {longest} tokens and {call.new_tokens} new ones need {needed} positions, but the model was "
            f"accelerated with max_length={slots.max_length}; ask for at most {most} with max_new_tokens, or accelerate"
            " with a larger max_length"
        )
    if not slots.free_slots():
        raise CapacityError(f"all {slots.slots} slots are taken; free one, or accelerate with a larger max_batch")


def _canvas(call: Prepared) -> Tensor:
    """The rows at full length (rows, max_length) int64 on the host: the prompts as given, then padding."""
    pad = call.config._pad_token_tensor
    shape = (call.input_ids.shape[0], call.config.max_length)
    ids = torch.full(shape, 0 if pad is None else int(pad), dtype=torch.int64, device="cpu")  # whatever the default is
    ids[:, : call.width] = call.input_ids.cpu()
    return ids


def _chooser(slots: Slots, call: Prepared, prompts: Sequence[Tensor], ids: Tensor) -> Chooser:
    sampling = None if call.keeps_logits else device_sampling(call.processors, call.config.do_sample, _padding(call))
    if sampling is not None:
        return ByDevice(slots, sampling, len(prompts))
    return ByProcessors(slots, call.processors, bool(call.config.do_sample), ids, call.keeps_logits)


def _padding(call: Prepared) -> str:
    """ "none", "left", or "other": right, or holes."""
    if call.attention_mask is None or bool((call.attention_mask != 0).all()):
        return "none"
    mask = (call.attention_mask != 0).int()
    return "left" if bool((mask.diff(dim=1) >= 0).all()) else "other"


@contextmanager
def _occupied(slots: Slots, taken: Sequence[int]) -> Iterator[None]:
    """Slots that are free again afterwards, whatever happens, and whichever of them were filled until then."""
    try:
        yield
    finally:
        for slot in set(taken) - set(slots.free_slots()):
            slots.free(slot)


def _kept_logits(call: Prepared, chooser: Chooser) -> dict[str, Any]:
    if not isinstance(chooser, ByProcessors):
        return {}
    kept = {"scores": chooser.scores, "logits": chooser.logits}
    wanted = {"scores": call.config.output_scores, "logits": call.config.output_logits}
    device = call.input_ids.device
    return {name: tuple(step.to(device) for step in kept[name]) for name, it_is in wanted.items() if it_is}
