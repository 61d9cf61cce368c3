"""Parity of a server with a checkpoint: log-probabilities of prompts that it echoes, against an oracle of the weights.

With `echo` a server names the likeliest tokens at every place of a prompt. At each place p, c_p is the mean square
distance of its log-probabilities of those tokens from the exact ones (the checkpoint upcast, see
`flashnorm.verify.oracle`), in nats squared.

**What rounding explains.** Nobody knows which dtype the server runs in, but bf16 is the coarsest that servers add up in
(see `flashnorm.verify.endpoint.distance`). r_p is the same distance for the checkpoint run here in bf16, weights
rounded to it as well, at the same places and tokens. Another engine rounds as often and adds in another order, so its
mean square is at most that, and a folded checkpoint adds `ADDED` of it (`flashnorm.verify.bounds`): sum c <=
(1 + ADDED) sum r, widened by the sampling of a finite number of places; the same for the geometric mean, which a few
places do not move. A server in finer arithmetic lies far below; one with quantised weights computes something else, and
fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flashnorm.errors import Refusal
from flashnorm.verify.bounds import ADDED, ratio_of_sums, sampling_slack, typical_ratio
from flashnorm.verify.endpoint.client import Client, token_id
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.engines.model import model_engine
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check
from flashnorm.verify.subject import Subject

SERVED = torch.bfloat16


def served_engine(subject: Subject) -> Engine:
    """The checkpoint as the coarsest right server runs it, with an oracle of its stored weights."""
    return model_engine(subject.load(SERVED), subject.name, lambda: subject.load(None))


def check_parity(client: Client, prompts: Sequence[Sequence[int]], reference: Callable[[], Engine] | None) -> Outcome:
    """`prompts`: token ids. `reference`: made when needed, of the checkpoint; None: the check is skipped."""
    if reference is None:
        return Outcome("parity", skipped="there is nothing to compare with; give --reference DIR")
    try:
        answers = [client.complete(prompt, 1, echo=True) for prompt in prompts]
    except Refusal as reason:
        return Outcome("parity", skipped=f"the server does not echo prompts: {reason}")
    if any(len(answer.steps) <= len(prompt) for answer, prompt in zip(answers, prompts, strict=True)):
        return Outcome("parity", skipped="the server does not echo prompts")
    engine, squares, places = reference(), [], []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([list(prompt)])
        assert engine.exact is not None
        exact, own = (of(ids)[0].cpu().double().log_softmax(-1) for of in (engine.exact, engine.fresh))
        for place in range(1, len(prompt)):
            squares.append(_squares(answer.steps[place], own[place - 1], exact[place - 1]))
            places.append(f"token {place} of prompt {number}")
    return judge_parity(torch.tensor(squares, dtype=torch.float64), places)


def _squares(step: Mapping[str, float], own: Tensor, exact: Tensor) -> tuple[float, float]:
    """Mean square distances of the server's and of our own log-probabilities from the exact ones, over its tokens."""
    ids = [token_id(name) for name in step]
    if not ids or any(i is None or i >= len(exact) for i in ids):
        return math.nan, math.nan  # a place without tokens, or with tokens that the checkpoint does not have
    chosen, served = torch.tensor(ids), torch.tensor(list(step.values()), dtype=torch.float64)
    right = exact[chosen]
    return float((served - right).square().mean()), float((own[chosen] - right).square().mean())


def judge_parity(squares: Tensor, places: Sequence[str]) -> Outcome:
    """`squares`: (places, 2), the server's distance and that which rounding explains, squared; `places`: in words."""
    theirs, ours = squares.unbind(1)
    bad = (~squares.isfinite().all(1)).nonzero()[:, 0].tolist()
    figures = [
        Check(
            "unusable_places",
            len(bad),
            0,
            f"at {places[bad[0]]} the server names no token that the checkpoint has, or no number" if bad else "",
        )
    ]
    if not bad:
        slack = sampling_slack(theirs, ours)
        value, bound = math.sqrt(ratio_of_sums(theirs, ours)), math.sqrt((1 + ADDED) * slack)
        worst = places[int(theirs.argmax())]
        figures.append(Check("drift_ratio", value, bound, _words("", value, bound, worst)))
        ratio, slack = typical_ratio(theirs, ours)
        value, bound = math.sqrt(ratio), math.sqrt((1 + ADDED) * slack)
        figures.append(Check("typical_drift_ratio", value, bound, _words("at a typical place, ", value, bound, worst)))
    note = f"{len(places)} places of prompts; a figure of 1 is what running the checkpoint in bf16 does"
    return Outcome("parity", tuple(figures), notes=(note,))


def _words(where: str, value: float, bound: float, worst: str) -> str:
    return (
        f"{where}the server's log-probabilities lie {value:.3g} times as far from the exact ones as the checkpoint's "
        f"in bf16, where rounding explains {bound:.3g} (farthest at {worst}): it does not compute what the checkpoint "
        "says"
    )
