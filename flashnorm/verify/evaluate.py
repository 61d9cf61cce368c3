"""Everything that is asked of one model, in one load: its weights are upcast in place from one question to the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from flashnorm.errors import Refusal
from flashnorm.verify.forward import TransformersModel, logits_of
from flashnorm.verify.greedy import Continuation, greedy
from flashnorm.verify.oracle import choose_oracle, exact_logits
from flashnorm.verify.perplexity import token_losses
from flashnorm.verify.reach import fingerprints, unused_weights
from flashnorm.verify.samples import Samples, context_limit
from flashnorm.verify.steps import Progress
from flashnorm.verify.subject import Subject, refusing


@dataclass(frozen=True)
class Arithmetic:
    """The dtype that the weights are stored in, and those that the model is run in: its own, and the oracle's."""

    stored: torch.dtype
    own: torch.dtype
    oracle: torch.dtype

    @property
    def fine(self) -> torch.dtype:
        """For text, where the rounding of activations would hide what the checkpoints themselves do."""
        return torch.promote_types(self.stored, torch.float32)


@dataclass(frozen=True)
class Answers:
    """What one model says. Logits: (positions, vocabulary), in its own dtype and in the oracle's; losses: (tokens,).

    `unused`: weights that the logits do not depend on, with the SHA-256 of each as it is stored. `causal`: whether each
    position's logits predict the next token.
    """

    arithmetic: Arithmetic
    logits: torch.Tensor
    exact: torch.Tensor
    losses: torch.Tensor | None
    continuations: list[Continuation]
    unused: dict[str, str] = field(default_factory=dict)
    causal: bool = True


def evaluate(
    subject: Subject,
    samples: Samples,
    new_tokens: int,
    dtype: torch.dtype | None,
    oracle: torch.dtype | None,
    progress: Progress,
) -> Answers:
    """Load the model, ask everything, and let go of it.

    `dtype` None: the stored one, except that a model stored in fp64 is run in fp32, so that there is a drift to compare
    with. `oracle` None: as memory allows. Raises `CheckpointError` where the model cannot be loaded or run, and
    `Refusal` where no oracle fits.
    """
    progress(f"{subject.name}: loading")
    model = subject.load(None)
    stored = _main_dtype(model)
    own = dtype or (torch.float32 if stored == torch.float64 else stored)
    if own != stored:
        del model  # before the next one comes: two at once may not fit, and the choice of the oracle counts one
        model = subject.load(own)
    with refusing(f"{subject.name} cannot be run"):
        progress(f"{subject.name}: logits in {dtype_name(own)}")
        with unused_weights(model) as names:
            logits = logits_of(model, samples.excerpts)
        if own != stored:
            del model
            model = subject.load(None)
        unused = fingerprints(model, names)
        arithmetic = Arithmetic(stored, own, oracle or choose_oracle(model, own, logits.numel()))
        model = model.to(arithmetic.fine)
        continuations = _continue(model, subject, samples, new_tokens, progress)
        losses = _lose(model, subject, samples, progress)
        progress(f"{subject.name}: logits in {dtype_name(arithmetic.oracle)}")
        exact = exact_logits(model, samples.excerpts, arithmetic.oracle)
    return Answers(arithmetic, logits, exact, losses, continuations, unused, is_causal(model))


def _continue(
    model: TransformersModel, subject: Subject, samples: Samples, new_tokens: int, progress: Progress
) -> list[Continuation]:
    if new_tokens == 0 or not model.can_generate():
        return []
    room = context_limit(subject)
    if new_tokens > room:
        raise Refusal(
            f"{subject.name} has room for {room} new tokens, half its positions, not for {new_tokens}; give "
            f"--new-tokens {room} or fewer"
        )
    progress(f"{subject.name}: greedy continuation of {len(samples.prompts)} prompts")
    with refusing(f"{subject.name} cannot generate (new_tokens=0 leaves that out)"):
        return greedy(model, samples.prompts, new_tokens)


def _lose(model: TransformersModel, subject: Subject, samples: Samples, progress: Progress) -> torch.Tensor | None:
    if samples.windows is None or not is_causal(model):
        return None
    progress(f"{subject.name}: perplexity of {samples.windows.numel()} tokens")
    return token_losses(model, samples.windows, samples.prefix)


def is_causal(model: TransformersModel) -> bool:
    """Whether each position's logits are a prediction of the next token from those before it alone."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _main_dtype(model: TransformersModel) -> torch.dtype:
    """The dtype of most of the weights; some models keep a few in fp32 whatever the rest is."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]
