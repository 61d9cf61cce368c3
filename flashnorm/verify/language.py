"""Language: the text that a subject reads and writes, against its source.

**Perplexity.** Both read the same tokens; the mean difference of their losses comes with a bootstrap interval, over
blocks of `_BLOCK` neighbouring tokens since neighbours are not independent (Künsch, 1989). What is judged is the least
difference that the interval leaves: an interval that reaches down to what rounding explains proves nothing. Rounding
explains `perplexity_bound` of the divergence that it causes (`flashnorm.verify.bounds`).

**Repetition.** A lag of one step doubles tokens and makes text go round in circles, while each token is still a likely
one. So greedy text from the cache is compared with greedy text of the source, made without a cache: the share of
tokens that repeat the one, two or three places before them, prompt by prompt. The excess is a mean over prompts, and
judged by its own standard error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashnorm.verify.bounds import ADDED, SIGMAS, perplexity_bound
from flashnorm.verify.divergence import kl_divergence
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

PROMPTS, PROMPT = 4, 8
_BLOCK = 16
_RESAMPLES = 2000
_INTERVAL = 0.999


def check_language(engine: Engine, ids: Tensor, source: Engine | None, new_tokens: int) -> Outcome:
    """`ids`: (count,). `source`: what the subject should say; None: itself without its cache, for repetition alone."""
    figures: list[Check] = []
    notes: list[str] = []
    if source is not None and source.exact is not None:
        figure, note = _perplexity(engine, ids, source)
        figures.append(figure)
        notes.append(note)
    else:
        notes.append("no perplexity: there is no reference to compare with")
    if engine.begin is not None:
        prompts = _prompts(ids)
        written = decode_greedily(engine, prompts, new_tokens)
        expected = write_afresh(source or engine, prompts, new_tokens)
        figures.append(repetition_check(written, expected))
    if not figures:
        return Outcome(
            "language", skipped=f"{engine.name} cannot decode, and there is no reference: {engine.undecodable}"
        )
    return Outcome("language", tuple(figures), notes=tuple(notes))


def _perplexity(engine: Engine, ids: Tensor, source: Engine) -> tuple[Check, str]:
    assert source.exact is not None
    exact = source.exact(ids[None])[0]
    own, theirs = (of.fresh(ids[None])[0].cpu() for of in (source, engine))
    divergence = float(kl_divergence(exact, own).mean()) * (2 + ADDED)  # of the source and of the subject, together
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="none") for logits in (own, theirs)
    ]
    difference = losses[1] - losses[0]
    low, high = bootstrap_interval(difference)
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    least = math.nan if math.isnan(low + high) else least
    perplexities = [float(loss.mean().exp()) for loss in losses]
    bound = perplexity_bound(divergence, len(difference))
    words = (
        f"perplexity {perplexities[1]:.5g} against {perplexities[0]:.5g}: the logarithms differ by {least:.3g} at "
        f"least, where rounding explains {bound:.3g}"
    )
    note = (
        f"perplexity {perplexities[1]:.5g}, the source's {perplexities[0]:.5g}; difference of the logarithms "
        f"{float(difference.mean()):+.3g}, {_INTERVAL:.1%} interval {low:+.3g} to {high:+.3g}, {len(difference)} tokens"
    )
    return Check("perplexity_difference", least, bound, words), note


def bootstrap_interval(values: Tensor) -> tuple[float, float]:
    """The interval of the mean of `values` (count,) that `_INTERVAL` of block resamples fall into; the same every time.

    With fewer than two blocks nothing is known of the spread, and the interval is without end.
    """
    count = len(values) // _BLOCK
    if count < 2:
        return -math.inf, math.inf
    means = values[: count * _BLOCK].view(count, _BLOCK).mean(1)
    draws = torch.randint(count, (_RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    outer = (1 - _INTERVAL) / 2
    low, high = means[draws].mean(1).quantile(torch.tensor([outer, 1 - outer], dtype=values.dtype)).tolist()
    return low, high


def _prompts(ids: Tensor) -> Tensor:
    """(PROMPTS, PROMPT) cut evenly from `ids`."""
    starts = torch.linspace(0, len(ids) - PROMPT, PROMPTS).long()
    return torch.stack([ids[start : start + PROMPT] for start in starts])


def decode_greedily(engine: Engine, prompts: Tensor, new_tokens: int) -> Tensor:
    """(PROMPTS, new_tokens): each the likeliest after the cache's last logits, one sequence after the other."""
    assert engine.begin is not None
    rows = []
    for prompt in prompts:
        decoding = engine.begin(1)
        try:
            rows.append(_greedy(decoding.extend, prompt[None], new_tokens, cached=True))
        finally:
            decoding.close()
    return torch.cat(rows)


def write_afresh(engine: Engine, prompts: Tensor, new_tokens: int) -> Tensor:
    """The same without a cache."""
    return _greedy(engine.fresh, prompts, new_tokens, cached=False)


def _greedy(ask: Callable[[Tensor], Tensor], prompts: Tensor, new_tokens: int, *, cached: bool) -> Tensor:
    ids, fed = prompts, prompts
    for _ in range(new_tokens):
        fed = ask(fed if cached else ids)[:, -1].argmax(-1, keepdim=True).cpu()
        ids = torch.cat([ids, fed], dim=1)
    return ids[:, prompts.shape[1] :]


def repetition_check(written: Tensor, expected: Tensor) -> Check:
    """Both: (prompts, tokens). The excess of repetition in standard errors of its mean over prompts."""
    ours, theirs = ([repetition(row) for row in rows.tolist()] for rows in (written, expected))
    excess = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    mean, error = float(excess.mean()), float(excess.std()) / math.sqrt(len(excess))
    value = 0.0 if mean <= 0 else (mean / error if error > 0 else math.inf)
    words = (
        f"text written with the cache repeats itself: {sum(ours) / len(ours):.0%} of its tokens continue a repetition, "
        f"{sum(theirs) / len(theirs):.0%} in text written without"
    )
    return Check("repetition", value, SIGMAS, words)


def repetition(tokens: Sequence[int]) -> float:
    """The share of tokens that repeat the one, two or three places before them, and so begin or continue a loop."""
    if len(tokens) < 2:
        return 0.0
    repeated = [any(n >= k and token == tokens[n - k] for k in (1, 2, 3)) for n, token in enumerate(tokens)]
    return sum(repeated) / len(tokens)
