"""Whether a contender computes the model: its logits and the stock model's, both against wider arithmetic.

S and C: squared distances of the stock model's logits, and of the contender's, from those of the same weights in wider
arithmetic, summed over the vocabulary, one value per position; the stock model runs without a cache. Allowed is

    sum C <= k sum S · slack

with the slack that a finite number of positions needs (`flashnorm.verify.bounds`). This project's own ways have
k = 1.05²: the error may be 1.05 times the stock model's. For the others, k = 1 + 1/2: a library may round each product
once more than in the stock model's run over many tokens (partial sums in the model's dtype), which adds at most half of
S, as derived there.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnorm.bench.e2e.contender import Trace
from flashnorm.errors import CheckFailed
from flashnorm.verify.bounds import ADDED, ratio_of_sums, sampling_slack
from flashnorm.verify.forward import logits_of
from flashnorm.verify.oracle import exact_logits

OWN = 1.05**2
OTHERS = 1 + ADDED


@dataclass(frozen=True)
class Error:
    """A contender's distance from the wider arithmetic over the stock model's, and the most that is allowed."""

    over_stock: float
    allowed: float


class Judge:
    """Holds a stock model, and a copy of it in wider arithmetic: fp32 for half precision, else fp64."""

    def __init__(self, model: Any) -> None:
        self._model = model
        half = model.dtype in (torch.float16, torch.bfloat16)
        self._wider = torch.float32 if half else torch.float64
        self._exact = copy.deepcopy(model).to(self._wider)

    def judge(self, name: str, trace: Trace, *, own: bool) -> Error:
        """Compare a contender's trace. Raises `CheckFailed`, naming it, for wrong logits or tokens."""
        _require_greedy(name, trace)
        count = trace.logits.shape[1]
        exact, stock = (
            logits.unflatten(0, trace.ids.shape)[:, -count:].double()
            for logits in (
                exact_logits(self._exact, trace.ids, self._wider),
                logits_of(self._model, trace.ids),
            )
        )
        theirs, stocks = ((logits.double() - exact).square().sum(-1).flatten() for logits in (trace.logits, stock))
        ratio = ratio_of_sums(theirs, stocks)
        allowed = (OWN if own else OTHERS) * sampling_slack(theirs, stocks)
        if not ratio <= allowed:
            raise CheckFailed(
                f"{name} is wrong: its logits are {ratio**0.5:.3g} times as far from exact ones as the stock model's "
                f"are, and {allowed**0.5:.3g} is allowed; nothing was timed"
            )
        return Error(ratio**0.5, allowed**0.5)


def _require_greedy(name: str, trace: Trace) -> None:
    """The tokens must be the likeliest ones, and those that were read next."""
    picked = trace.logits.gather(-1, trace.chosen[..., None])[..., 0]
    fed: Tensor = trace.ids[:, trace.ids.shape[1] - trace.logits.shape[1] + 1 :]
    if not torch.equal(picked, trace.logits.amax(-1)):
        raise CheckFailed(f"{name} is wrong: it takes other tokens than its logits prefer; nothing was timed")
    if not torch.equal(fed, trace.chosen[:, :-1]):
        raise CheckFailed(f"{name} is wrong: it goes on from other tokens than it took; nothing was timed")
