"""Lag: does every decode step answer for its own token, and not for one before?

Cached logits c_n of step n are compared with fresh ones, f_n, of the same prefix, which one forward pass gives for all
steps at once, and with those of the steps before. With d(n, k) = ‖c_n - f_{n-k}‖ (up to a constant) two things are
asked.

**Stale reads.** Step n is stale by k when it matches step n - k much better than itself, d(n, k) < d(n, 0) / 2, and
the two can be told apart. If c_n = f_n + e, then d(n, k) < d(n, 0) says that e points towards f_{n-k} by more than
half of Δ = ‖f_n - f_{n-k}‖. By rounding alone e has a component of standard deviation at most sqrt(2) s along that
direction (see `flashnorm.verify.rounding`), so where Δ / 2 > SIGMAS sqrt(2) s a right step is called stale with a
chance below that of `SIGMAS` standard deviations, one in three million. Steps whose logits hardly differ from those
before (Δ below that) decide nothing.

And where a choice of experts turns over, so that e is as large as Δ? Then d(n, k) < d(n, 0) / 2 still takes an angle of
at most 30 degrees between e and the way to f_{n-k}, whatever the size of e: in D dimensions a random direction is that
near with a chance below 2^(1 - D), with D the width of the model. So a single stale step among thousands is found, and
nothing else is mistaken for one.

**The cache itself.** Every c_n lies as near to f_n as rounding explains: a value written at the wrong position, or a
position off by one, shows here. A read that is stale in one layer only moves c_n part of the way: the mean over steps
of the projection of c_n - f_n onto f_{n-k} - f_n, in units of that vector, is 1 for a whole lag of k steps, and for a
partial one more than for the other k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flashnorm.verify.bounds import SIGMAS
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.rounding import Rounding, distance_check

OFFSETS = 5  # how many steps back an answer is looked for, its own included
PROMPT = 8
_BLOCK = 64  # steps compared at once: temporaries in fp64 stay small whatever the vocabulary
_MAP = 48  # steps of the heat map


@dataclass(frozen=True)
class _Distances:
    """Squared, fp64: `own` (steps, OFFSETS) of c_n from f_{n-k}, `apart` (steps, OFFSETS) of f_n from f_{n-k}.

    Where there is no step n - k, infinity and zero.
    """

    own: Tensor
    apart: Tensor


def check_lag(engine: Engine, ids: Tensor, rounding: Rounding, prompt: int = PROMPT) -> Outcome:
    """Decode `ids` (length,) step by step after its first `prompt` tokens, and compare each step."""
    if engine.begin is None:
        return Outcome("lag", skipped=f"{engine.name} cannot decode: {engine.undecodable}")
    cached = decode_steps(engine, ids, prompt)
    fresh = engine.fresh(ids[None])[0].cpu()
    distances = _compare(cached, fresh, prompt)
    outcome = judge_lag(distances.own, distances.apart, rounding, prompt)
    series = {**outcome.series, "heat": _heat(cached, fresh, prompt, outcome)}
    return Outcome(outcome.name, outcome.figures, "", outcome.notes, outcome.cause, series)


def decode_steps(engine: Engine, ids: Tensor, prompt: int) -> Tensor:
    """Logits (steps, vocabulary) on the CPU: after the prompt, and after each later token fed by itself."""
    assert engine.begin is not None
    decoding = engine.begin(1)
    try:
        steps = [decoding.extend(ids[None, :prompt])[0, -1].cpu()]
        steps += [decoding.extend(ids[None, n : n + 1])[0, -1].cpu() for n in range(prompt, len(ids))]
    finally:
        decoding.close()
    return torch.stack(steps)


def judge_lag(own: Tensor, apart: Tensor, rounding: Rounding, prompt: int) -> Outcome:
    """The verdict from squared distances (steps, OFFSETS); step i answers for the token at position prompt - 1 + i."""
    nearest = own.argmin(1)
    best, gap = (of.gather(1, nearest[:, None])[:, 0].sqrt() for of in (own, apart))
    stale = ((best < own[:, 0].sqrt() / 2) & (gap / 2 > rounding.allowed)).nonzero()[:, 0].tolist()
    decided = int((apart[1:, 1].sqrt() / 2 > rounding.allowed).sum())
    far = partial(_far_words, len(own), prompt)
    figures = (
        Check("stale_steps", len(stale), 0, _stale_words(stale, nearest, own, prompt)),
        distance_check("cached_distance", own[:, 0], rounding, far, everywhere=True),
    )
    ways = _ways(own, apart, rounding)
    failed = not all(figure.passed for figure in figures)
    notes = [f"{decided} of {len(own) - 1} steps differ enough from the step before to tell the two apart"]
    return Outcome(
        "lag",
        figures,
        notes=tuple(notes),
        cause=_cause(stale, nearest, ways, len(own)) if failed else "",
        series={
            "position": list(range(prompt - 1, prompt - 1 + len(own))),
            "own_distance": own[:, 0].sqrt().tolist(),
            "previous_distance": own[:, 1].sqrt().tolist(),
            "allowed": [rounding.allowed] * len(own),
            "share": ways.mean(0).tolist() if len(ways) else [],
        },
    )


def _compare(cached: Tensor, fresh: Tensor, prompt: int) -> _Distances:
    own, apart = [], []
    for start in range(0, len(cached), _BLOCK):
        c = cached[start : start + _BLOCK].double()
        first = prompt - 1 + start
        f = fresh[first : first + len(c)].double()
        for k in range(OFFSETS):
            before = fresh[max(first - k, 0) : first - k + len(c)].double()
            missing = len(c) - len(before)  # at the very start there is no step that far back
            mine, theirs = (_squares(x[missing:] - before) for x in (c, f))
            own.append(torch.cat([torch.full((missing,), torch.inf, dtype=torch.float64), mine]))
            apart.append(torch.cat([torch.zeros(missing, dtype=torch.float64), theirs]))
    return _Distances(*(_columns(parts) for parts in (own, apart)))


def _columns(parts: list[Tensor]) -> Tensor:
    rows = [torch.stack(parts[i : i + OFFSETS], dim=1) for i in range(0, len(parts), OFFSETS)]
    return torch.cat(rows)


def _squares(difference: Tensor) -> Tensor:
    """Squared lengths (steps,) of rows less their mean."""
    return (difference - difference.mean(-1, keepdim=True)).square().sum(-1)


def _ways(own: Tensor, apart: Tensor, rounding: Rounding) -> Tensor:
    """(steps, OFFSETS - 1): for each k >= 1 the share of the way from f_n to f_{n-k}, by the law of cosines.

    Steps that hardly differ from one of those before say nothing and are left out.
    """
    usable = ((apart[:, 1:].sqrt() / 2 > rounding.allowed) & own[:, 1:].isfinite()).all(1)
    return ((own[:, :1] + apart[:, 1:] - own[:, 1:]) / (2 * apart[:, 1:]))[usable]


def _cause(stale: list[int], nearest: Tensor, ways: Tensor, steps: int) -> str:
    """A lag of the whole answer, of a part of it, or a cache that is wrong in another way."""
    if stale:
        late = int(nearest[stale].mode().values)
        often = "at every step" if len(stale) > 0.9 * (steps - 1) else f"at {len(stale)} of {steps} steps"
        return f"an output or a buffer of {late} step{'s' * (late > 1)} before is read {often}"
    late = _partial(ways)
    if late:
        return (
            f"a part of the computation reads what step n - {late} left behind: the logits lie "
            f"{float(ways[:, late - 1].mean()):.0%} of the way towards that step's"
        )
    return "the cache holds other keys and values than a fresh pass computes: look at where they are written"


def _partial(ways: Tensor) -> int:
    """The k towards which the logits lie farther than towards the other steps before, beyond chance; 0 for none.

    Any fault moves logits towards their mean, so towards all other steps alike: only a share above that of the others
    speaks of a lag. The difference is a mean over steps, judged by its own standard error.
    """
    if len(ways) < 2:
        return 0
    others = (ways.sum(1, keepdim=True) - ways) / (ways.shape[1] - 1)
    excess = ways - others
    scores = excess.mean(0) / (excess.std(0) / len(ways) ** 0.5)
    return int(scores.argmax()) + 1 if float(scores.max()) > SIGMAS else 0


def _stale_words(stale: list[int], nearest: Tensor, own: Tensor, prompt: int) -> str:
    if not stale:
        return ""
    step = stale[0]
    late = int(nearest[step])
    mine, theirs = (float(own[step, k].sqrt()) for k in (0, late))
    more = f" (and {len(stale) - 1} more steps)" if len(stale) > 1 else ""
    return (
        f"the logits at position {prompt - 1 + step}{more} are those of {late} step{'s' * (late > 1)} before: they lie "
        f"{theirs:.3g} from that step's and {mine:.3g} from their own"
    )


def _far_words(steps: int, prompt: int, index: int, times: float) -> str:
    return (
        f"cached logits differ from fresh ones by {times:.3g} times what rounding explains, at position "
        f"{prompt - 1 + index} of {prompt - 1 + steps}"
    )


def _heat(cached: Tensor, fresh: Tensor, prompt: int, outcome: Outcome) -> list[list[float]]:
    """(steps, steps) distances of cached step i from fresh step j, around the worst step."""
    own = outcome.series["own_distance"]
    worst = max(range(len(own)), key=lambda i: own[i] if own[i] == own[i] else 0.0)
    start = max(0, min(worst - _MAP // 2, len(own) - _MAP))
    c = cached[start : start + _MAP].double()
    f = fresh[prompt - 1 + start : prompt - 1 + start + _MAP].double()
    c, f = (x - x.mean(-1, keepdim=True) for x in (c, f))
    return torch.cdist(c, f, compute_mode="donot_use_mm_for_euclid_dist").tolist()
