"""The checks of an endpoint. All that is known of it are the likeliest tokens of each step with their probabilities.

**Lag.** A generated answer's step n was decoded against a cache. The same prefix asked for one token is prefilled, so
its probabilities f_n are computed another way. Step n is stale by k when its probabilities c_n match f_{n-k} more than
twice as well as f_n, and f_n and f_{n-k} lie so far apart, beyond 2 `ALLOWED`, that no rounding confuses them: if
|c_n - f_n| <= ALLOWED, the triangle inequality leaves |c_n - f_{n-k}| > ALLOWED >= |c_n - f_n|.

**Company and repeats.** One question has one answer, up to `ALLOWED`: asked again, in one request with others, and
while others are answered.

**Causality.** With `echo` a server gives the probabilities of the prompt's own tokens. Those up to token t must not
change when token t does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from flashnorm.errors import Refusal
from flashnorm.verify.endpoint.client import Answer, Client, Prompt
from flashnorm.verify.endpoint.distance import ALLOWED, distance, worst_distance
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

_BACK = 3  # steps before that an answer is looked for
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LEADS = 4  # tokens at the start of a prompt that always count: a change is made behind them


def check_lag(client: Client, prompt: Prompt, tokens: int) -> Outcome:
    """Generate `tokens` after `prompt` in one answer, then ask for each of its steps afresh."""
    answer = client.complete(prompt, tokens)
    fresh = [client.complete(prefix, 1).steps[0] for prefix in _prefixes(client, prompt, answer)]
    steps = answer.steps[: len(fresh)]
    stale = [n for n in range(1, len(steps)) if _stale_by(steps[n], fresh, n)]
    own = [distance(c, f) for c, f in zip(steps, fresh, strict=True)]
    typical = statistics.median(own)
    shown = ""
    if stale:
        n = stale[0]
        late = _stale_by(steps[n], fresh, n)
        more = f" (and at {len(stale) - 1} more)" if len(stale) > 1 else ""
        shown = (
            f"the log-probabilities at step {n}{more} of {len(steps)} are those of {late} step{'s' * (late > 1)} "
            f"before: they lie {distance(steps[n], fresh[n - late]):.3g} from that step's, {own[n]:.3g} from their own"
        )
    figures = (
        Check("stale_steps", len(stale), 0, shown),
        Check(
            "typical_distance",
            typical,
            ALLOWED,
            f"a generated step's probabilities differ by {typical:.3g} from those of the same prefix asked afresh: the "
            "cache holds something else than the prompt says",
        ),
    )
    before = [1.0, *(distance(c, f) for c, f in zip(steps[1:], fresh[:-1], strict=True))]
    decided = sum(distance(a, b) > 2 * ALLOWED for a, b in zip(fresh[1:], fresh[:-1], strict=True))
    return Outcome(
        "lag",
        figures,
        notes=(f"{decided} of {len(steps) - 1} steps differ enough from the step before to tell the two apart",),
        series={
            "position": list(range(len(steps))),
            "own_distance": own,
            "previous_distance": before,
            "allowed": [ALLOWED] * len(steps),
            "heat": [[distance(c, f) for f in fresh] for c in steps],
        },
    )


def _stale_by(step: dict[str, float], fresh: Sequence[dict[str, float]], n: int) -> int:
    """How many steps before answer for this one; 0 where it answers for itself, or nobody can tell."""
    own = distance(step, fresh[n])
    for k in range(1, min(_BACK, n) + 1):
        if distance(step, fresh[n - k]) < own / 2 and distance(fresh[n], fresh[n - k]) > 2 * ALLOWED:
            return k
    return 0


def _prefixes(client: Client, prompt: Prompt, answer: Answer) -> list[Prompt]:
    """The prompt, and the prompt with one token after another of the answer, but for the last.

    As text, up to the first token that is no whole character: what follows it cannot be joined to the prompt.
    """
    if isinstance(prompt, str):
        whole = next((n for n, token in enumerate(answer.tokens) if _NO_CHARACTER in token), len(answer.tokens) - 1)
        return [prompt + "".join(answer.tokens[:n]) for n in range(whole + 1)]
    ids = answer.ids
    if ids is None:
        raise Refusal(
            f"{client.url} does not name tokens by their ids, so that prompts cannot be ids; leave --reference out"
        )
    return [[*prompt, *ids[:n]] for n in range(len(ids))]


def check_determinism(client: Client, prompt: Prompt, tokens: int, repeats: int) -> Outcome:
    """The same request `repeats` times, one after the other."""
    first, *others = [client.complete(prompt, tokens) for _ in range(repeats)]
    return Outcome("determinism", (_alike("repeated", first, others),))


def check_batching(client: Client, prompts: Sequence[Prompt], tokens: int) -> Outcome:
    """Each prompt alone, all in one request, and each in a request of its own at the same time."""
    alone = [client.complete(prompt, tokens) for prompt in prompts]
    together = client.complete_all(prompts, tokens)
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(pool.map(lambda prompt: client.complete(prompt, tokens), prompts))
    figures = []
    for way, answers in (("in one request", together), ("at the same time", at_once)):
        pairs = [_alike(way, one, [other]) for one, other in zip(alone, answers, strict=True)]
        figures.append(max(pairs, key=lambda check: (not check.passed, check.value)))
    return Outcome("batching", tuple(figures))


def _alike(way: str, first: Answer, others: Sequence[Answer]) -> Check:
    value, step = max(
        (worst_distance(first, other) for other in others), key=lambda pair: (pair[0] != pair[0], pair[0])
    )
    words = f"{way}, the probabilities at step {step} differ by {value:.3g}, where rounding explains {ALLOWED:.3g}"
    return Check(f"another_answer ({way})", value, ALLOWED, words)


def check_causality(client: Client, prompt: Prompt, change: Callable[[Prompt, int], Prompt], places: int) -> Outcome:
    """`change(prompt, t)` changes its token (or word) t. Where the server cannot echo, the check is skipped."""
    try:
        before = client.complete(prompt, 1, echo=True)
    except Refusal as reason:
        return Outcome("causality", skipped=f"the server does not echo prompts: {reason}")
    length = len(before.tokens) - 1
    if length <= _LEADS + 1:
        return Outcome("causality", skipped="the server does not echo prompts, or the prompt is too short")
    step = max(1, (length - _LEADS) // places)
    figures: list[tuple[float, str]] = []
    for t in range(_LEADS, length, step):
        after = client.complete(change(prompt, t), 1, echo=True)
        common = next(n for n, pair in enumerate(zip(before.tokens, after.tokens, strict=False)) if len({*pair}) > 1)
        # The probabilities of token t itself are a matter of those before it.
        for p in range(1, common + 1):
            value = distance(before.steps[p], after.steps[p])
            words = f"changing token {common} of the prompt changed the probabilities at token {p} by {value:.3g}"
            figures.append((value, f"{words}, where rounding explains {ALLOWED:.3g}: the model sees the future"))
    value, words = max(figures, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return Outcome("causality", (Check("future_seen (prompt)", value, ALLOWED, words),))
