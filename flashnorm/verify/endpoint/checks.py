"""The checks of an endpoint. All that is known of it are the likeliest tokens of each step with their probabilities.

A is how far two right answers may lie apart (`flashnorm.verify.endpoint.distance`).

**Lag.** A generated answer's step n was decoded against a cache; the same prefix asked for one token is prefilled, and
gives f_n. Step n is stale by k when its answer c_n matches f_{n-k} more than twice as well as f_n, where f_n and
f_{n-k} lie more than 2 A apart: for a right answer, |c_n - f_n| <= A leaves |c_n - f_{n-k}| > A >= |c_n - f_n|. And the
typical step must lie nearer to its own fresh answer than half way to its neighbour's, or the cache holds something
else.

**Company and repeats.** One question has one answer, up to A: in one request with others, and while others are
answered. Asked again in the same way, it has the same one up to a few roundings of its logits.

**Causality.** With `echo` a server gives the probabilities of the prompt's own tokens. Those up to token t must not
change when token t does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from flashnorm.errors import Refusal
from flashnorm.verify.endpoint.client import Answer, Client, Prompt
from flashnorm.verify.endpoint.distance import (
    BACK,
    allowed_distance,
    distance,
    largest,
    same_way_distance,
    worst_distance,
)
from flashnorm.verify.outcome import Outcome
from flashnorm.verify.report import Check

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LEADS = 4  # tokens at the start of a prompt that always count: a change is made behind them


@dataclass(frozen=True)
class Text:
    """One generated answer: each step as it came from the cache and as its prefix gives it afresh."""

    steps: tuple[Mapping[str, float], ...]
    fresh: tuple[Mapping[str, float], ...]

    @property
    def allowed(self) -> float:
        """A, in nats."""
        return allowed_distance(self.steps, self.fresh)

    @property
    def allowed_same_way(self) -> float:
        """The same for one question asked twice in one way, in nats."""
        return same_way_distance(self.fresh)


def generate(client: Client, prompt: Prompt, tokens: int) -> Text:
    """Generate `tokens` after `prompt` in one answer, then ask for each of its steps afresh."""
    answer = client.complete(prompt, tokens)
    fresh = tuple(client.complete(prefix, 1).steps[0] for prefix in _prefixes(client, prompt, answer))
    return Text(answer.steps[: len(fresh)], fresh)


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


def check_lag(text: Text) -> Outcome:
    """Every step against its own fresh answer, and against those of the steps before."""
    steps, fresh = text.steps, text.fresh
    stale = [n for n in range(1, len(steps)) if _stale_by(text, n)]
    own = [distance(c, f) for c, f in zip(steps, fresh, strict=True)]
    before = [distance(c, f) for c, f in zip(steps[1:], fresh, strict=False)]
    between = [distance(a, b) for a, b in zip(fresh[1:], fresh, strict=False)]
    typical, half = statistics.median(own), statistics.median(between) / 2 if between else math.inf
    figures = (
        Check("stale_steps", len(stale), 0, _stale_words(text, stale, own)),
        Check(
            "typical_distance",
            typical,
            half,
            f"a typical step's log-probabilities lie {typical:.3g} nats from those of the same prefix asked afresh, "
            f"and half way to the step before is {half:.3g}: the cache holds something else than the prompt says",
        ),
    )
    decided = sum(apart > 2 * text.allowed for apart in between)
    return Outcome(
        "lag",
        figures,
        notes=(
            f"{decided} of {len(between)} steps differ enough from the step before to tell the two apart",
            f"two right answers may lie {text.allowed:.3g} nats apart",
        ),
        series={
            "position": list(range(len(steps))),
            "own_distance": own,
            "previous_distance": [math.inf, *before],
            "allowed": [text.allowed] * len(steps),
            "heat": [[distance(c, f) for f in fresh] for c in steps],
        },
    )


def _stale_by(text: Text, n: int) -> int:
    """How many steps before answer for this one; 0 where it answers for itself, or nobody can tell."""
    own = distance(text.steps[n], text.fresh[n])
    for k in range(1, min(BACK, n) + 1):
        near = distance(text.steps[n], text.fresh[n - k]) < own / 2
        if near and distance(text.fresh[n], text.fresh[n - k]) > 2 * text.allowed:
            return k
    return 0


def _stale_words(text: Text, stale: Sequence[int], own: Sequence[float]) -> str:
    if not stale:
        return ""
    n = stale[0]
    late = _stale_by(text, n)
    more = f" (and at {len(stale) - 1} more)" if len(stale) > 1 else ""
    theirs = distance(text.steps[n], text.fresh[n - late])
    return (
        f"the log-probabilities at step {n}{more} of {len(text.steps)} are those of {late} step{'s' * (late > 1)} "
        f"before: they lie {theirs:.3g} nats from that step's, {own[n]:.3g} from their own"
    )


def check_determinism(client: Client, prompt: Prompt, tokens: int, repeats: int, allowed: float) -> Outcome:
    """The same request `repeats` times, one after the other. `allowed`: nats."""
    first, *others = [client.complete(prompt, tokens) for _ in range(repeats)]
    return Outcome("determinism", (_alike("repeated", [(first, other) for other in others], allowed),))


def check_batching(client: Client, prompts: Sequence[Prompt], tokens: int, allowed: float) -> Outcome:
    """Each prompt alone, all in one request, and each in a request of its own at the same time. `allowed`: nats."""
    alone = [client.complete(prompt, tokens) for prompt in prompts]
    together = client.complete_all(prompts, tokens)
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(pool.map(lambda prompt: client.complete(prompt, tokens), prompts))
    figures = [
        _alike(way, list(zip(alone, answers, strict=True)), allowed)
        for way, answers in (("in one request", together), ("at the same time", at_once))
    ]
    return Outcome("batching", tuple(figures))


def _alike(way: str, pairs: Sequence[tuple[Answer, Answer]], allowed: float) -> Check:
    found = [worst_distance(one, other) for one, other in pairs]
    value, place = largest([worst for worst, _ in found])
    words = (
        f"{way}, the log-probabilities at step {found[place][1]} differ by {value:.3g} nats, where rounding explains "
        f"{allowed:.3g}"
    )
    return Check(f"another_answer ({way})", value, allowed, words)


def check_causality(
    client: Client, prompt: Prompt, change: Callable[[Prompt, int], Prompt], places: int, allowed: float
) -> Outcome:
    """`change(prompt, t)` changes its token (or word) t. Where the server cannot echo, the check is skipped."""
    try:
        before = client.complete(prompt, 1, echo=True)
    except Refusal as reason:
        return Outcome("causality", skipped=f"the server does not echo prompts: {reason}")
    length = len(before.tokens) - 1
    if length <= _LEADS + 1:
        return Outcome("causality", skipped="the server does not echo prompts, or the prompt is too short")
    values, words = [], []
    for t in range(_LEADS, length, max(1, (length - _LEADS) // places)):
        after = client.complete(change(prompt, t), 1, echo=True)
        common = next(n for n, pair in enumerate(zip(before.tokens, after.tokens, strict=False)) if len({*pair}) > 1)
        for p in range(1, common + 1):  # the probabilities of token t itself are a matter of those before it
            # Servers add the token that was given, which at t is another one in each.
            given = {before.tokens[p], after.tokens[p]} if p == common else set()
            values.append(distance(_without(before.steps[p], given), _without(after.steps[p], given)))
            words.append(f"changing token {common} of the prompt changed the log-probabilities at token {p}")
    value, place = largest(values)
    meaning = f"{words[place]} by {value:.3g} nats, where rounding explains {allowed:.3g}: the model sees the future"
    return Outcome("causality", (Check("future_seen (prompt)", value, allowed, meaning),))


def _without(step: Mapping[str, float], names: set[str]) -> dict[str, float]:
    return {name: value for name, value in step.items() if name not in names}
