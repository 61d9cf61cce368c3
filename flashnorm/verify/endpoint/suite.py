"""`flashnorm.verify --endpoint`: every check that token log-probabilities allow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flashnorm.errors import Refusal
from flashnorm.verify.endpoint.checks import (
    Text,
    check_batching,
    check_causality,
    check_determinism,
    check_lag,
    generate,
)
from flashnorm.verify.endpoint.client import Client, Prompt
from flashnorm.verify.endpoint.parity import check_parity, served_engine
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.levels import EXTENTS, Extent, Level
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.samples import PASSAGES, token_stream
from flashnorm.verify.subject import Subject, open_subject

_PROMPTS, _LENGTH = 3, 24  # prompts asked at once, and tokens of one
_WORDS = 20  # of a prompt that is text
_OTHER = "zebra"  # what a word is changed to


@dataclass(frozen=True)
class _Question:
    client: Client
    prompts: Sequence[Prompt]
    change: Callable[[Prompt, int], Prompt]
    extent: Extent
    text: Text
    checked: Sequence[Sequence[int]] = ()  # prompts whose log-probabilities are compared with the reference's
    reference: Callable[[], Engine] | None = None


CHECKS: dict[str, Callable[[_Question], Outcome]] = {
    "parity": lambda q: check_parity(q.client, q.checked, q.reference),
    "causality": lambda q: check_causality(q.client, q.prompts[0], q.change, q.extent.places, q.text.allowed_same_way),
    "lag": lambda q: check_lag(q.text),
    "batching": lambda q: check_batching(q.client, q.prompts, q.extent.new_tokens, q.text.allowed),
    "determinism": lambda q: check_determinism(
        q.client, q.prompts[1], q.extent.new_tokens, q.extent.repeats, q.text.allowed_same_way
    ),
}


def endpoint_battery(
    url: str,
    model: str,
    *,
    reference: str | os.PathLike[str] | None = None,
    level: str = "standard",
    only: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> BatteryReport:
    """Check the model called `model` behind `url`, which ends in `/v1`.

    `reference`: the folder of its checkpoint, with which the server's log-probabilities are compared, and whose
    tokenizer turns prompts into ids, so that the prefix of every step is exactly what was generated; without it prompts
    are text, which a tokenizer may split otherwise where an answer is joined to it. Raises `Refusal` where the server
    cannot be asked, or for an unknown check.
    """
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise Refusal(f"there is no check {unknown[0]!r} of an endpoint; there are {', '.join(CHECKS)}")
    if level not in Level.__members__:
        raise Refusal(f"level {level!r} does not exist; use one of {', '.join(Level.__members__)}")
    client, extent = Client(url, model), EXTENTS[Level(level)]
    subject = open_subject(Path(reference)) if reference else None
    prompts, change = _ids(subject) if subject else _texts()
    checked = _stretches(subject, extent.sample // _LENGTH) if subject else []
    engine = partial(served_engine, subject) if subject else None
    chosen = [name for name in CHECKS if not only or name in only]
    say = progress or (lambda _: None)
    text = Text((), ())
    if chosen != ["parity"]:  # which reads prompts alone
        say("a text, and each of its steps afresh")
        text = generate(client, prompts[0], extent.steps // 4)
    outcomes = []
    for name in chosen:
        say(name)
        start = time.monotonic()
        outcome = CHECKS[name](_Question(client, prompts, change, extent, text, checked, engine))
        outcomes.append(replace(outcome, seconds=time.monotonic() - start))
    notes = () if reference else ("prompts are text; --reference DIR makes them ids, and every prefix exact",)
    return BatteryReport(f"{model} at {url}", level, tuple(outcomes), notes)


def _stretches(subject: Subject, count: int) -> list[list[int]]:
    """`count` prompts of `_LENGTH` ids, one after the other in the built-in passages."""
    rows: list[list[int]] = token_stream(subject, None, count * _LENGTH).view(count, _LENGTH).tolist()
    return rows


def _ids(subject: Subject) -> tuple[list[Prompt], Callable[[Prompt, int], Prompt]]:
    rows = _stretches(subject, _PROMPTS)
    vocabulary = subject.vocabulary or max(map(max, rows)) + 2

    def change(prompt: Prompt, place: int) -> Prompt:
        changed = [int(token) for token in prompt]
        changed[place] = (changed[place] + 1) % vocabulary
        return changed

    return list(rows), change


def _texts() -> tuple[list[Prompt], Callable[[Prompt, int], Prompt]]:
    def change(prompt: Prompt, place: int) -> Prompt:
        words = str(prompt).split(" ")
        words[min(place, len(words) - 1)] = _OTHER
        return " ".join(words)

    return [" ".join(passage.split(" ")[:_WORDS]) for passage in PASSAGES[:_PROMPTS]], change
