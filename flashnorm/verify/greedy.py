"""Greedy continuation by stock `generate`, and the first token where two models part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from flashnorm.verify.divergence import opposed_margin
from flashnorm.verify.forward import TransformersModel, decoder_start


@dataclass(frozen=True)
class Continuation:
    """One prompt's new tokens, up to and with the end-of-sequence token, and the logits each was chosen from."""

    tokens: tuple[int, ...]
    logits: torch.Tensor  # (tokens, vocabulary), in the model's dtype


@dataclass(frozen=True)
class Difference:
    """The first token where two continuations part. A margin is the model's top-1 minus top-2 logit there.

    `opposed_margin`: by how much the logit difference of the two tokens changes from model to model.
    """

    position: int
    reference_token: int
    candidate_token: int
    reference_text: str
    candidate_text: str
    reference_margin: float
    candidate_margin: float
    opposed_margin: float


@dataclass(frozen=True)
class GreedyPair:
    """One prompt, both continuations as text, and where they part (None: nowhere)."""

    prompt: str
    reference: str
    candidate: str
    tokens: int
    difference: Difference | None


def greedy(model: TransformersModel, prompts: torch.Tensor, new_tokens: int) -> list[Continuation]:
    """Continue each of `prompts` (count, length) by up to `new_tokens` tokens, whatever sampling the model's own
    generation config asks for."""
    own = model.generation_config
    ends = _as_tuple(own.eos_token_id)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id if own.pad_token_id is not None else next(iter(ends), 0),
        decoder_start_token_id=decoder_start(model) if model.config.is_encoder_decoder else None,
    )
    with torch.inference_mode():
        output = model.generate(prompts, attention_mask=torch.ones_like(prompts))
    logits = torch.stack(output.logits, dim=1)
    rows = output.sequences[:, -logits.shape[1] :].tolist()
    lengths = [_length(row, ends) for row in rows]
    return [Continuation(tuple(row[:n]), logits[i, :n]) for i, (row, n) in enumerate(zip(rows, lengths, strict=True))]


def compare_greedy(
    prompts: torch.Tensor,
    reference: Sequence[Continuation],
    candidate: Sequence[Continuation],
    decode: Callable[[list[int]], str],
) -> tuple[GreedyPair, ...]:
    """Pair up the continuations of the same prompts. `decode` turns token ids into text."""
    return tuple(
        GreedyPair(
            prompt=decode(prompt.tolist()),
            reference=decode(list(ours.tokens)),
            candidate=decode(list(theirs.tokens)),
            tokens=len(ours.tokens),
            difference=_first_difference(ours, theirs, decode),
        )
        for prompt, ours, theirs in zip(prompts, reference, candidate, strict=True)
    )


def _first_difference(
    ours: Continuation, theirs: Continuation, decode: Callable[[list[int]], str]
) -> Difference | None:
    """Up to there both models have read the same tokens, so their logits may be compared. NaN agrees with nothing."""
    broken = [(of.logits.isnan().any(-1)).tolist() for of in (ours, theirs)]
    for position, (a, b, *nan) in enumerate(zip(ours.tokens, theirs.tokens, *broken, strict=False)):
        if a != b or any(nan):
            return Difference(
                position=position,
                reference_token=a,
                candidate_token=b,
                reference_text=decode([a]),
                candidate_text=decode([b]),
                reference_margin=_margin(ours.logits[position]),
                candidate_margin=_margin(theirs.logits[position]),
                opposed_margin=opposed_margin(ours.logits[position], theirs.logits[position]),
            )
    return None


def _margin(logits: torch.Tensor) -> float:
    first, second = logits.double().topk(2).values.tolist()
    return first - second


def _length(row: list[int], ends: tuple[int, ...]) -> int:
    """Up to and with the first end token: what follows it is padding."""
    return next((i + 1 for i, token in enumerate(row) if token in ends), len(row))


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
