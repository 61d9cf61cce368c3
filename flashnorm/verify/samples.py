"""The token ids that both models see: excerpts for logits, prompts to continue, windows for perplexity."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import takewhile

import torch

from flashnorm.errors import Refusal
from flashnorm.verify.subject import Subject

EXCERPT = 64  # tokens of one excerpt: long enough for attention to matter, short enough for several contexts
PROMPTS, PROMPT = 4, 16
BUILT_IN = "built-in passages"
WINDOW = 512
_CHARACTERS = 16  # read for each token wanted; English takes four to five, code and other scripts fewer

# A few kinds of text, so that the continuations do not all run through the same layers in the same way.
PASSAGES = (
    "The river rises in the hills to the north, gathers the water of a dozen smaller streams, and reaches the plain "
    "already broad and slow. In spring it floods the lower meadows, and the people of the valley, who have lived with "
    "it for centuries, build their houses on the rising ground to the east.",
    "def moving_average(values, width):\n    total = sum(values[:width])\n    averages = [total / width]\n"
    "    for old, new in zip(values, values[width:]):\n        total += new - old\n"
    "        averages.append(total / width)\n    return averages\n",
    "Question: A train leaves at 9:40 and travels 150 kilometres at 60 kilometres an hour. When does it arrive?\n"
    "Answer: The journey takes 150 / 60 = 2.5 hours, so the train arrives at 12:10. If it is 25 minutes late, it "
    "arrives at 12:35.",
    '{"name": "sensor-7", "readings": [20.1, 20.4, 19.8, 21.0], "unit": "celsius", "location": {"room": "cellar", '
    '"floor": -1}, "active": true, "comment": null}',
    "Le matin, la boulangère ouvre sa boutique avant le lever du soleil. Elle range les pains encore chauds dans la "
    "vitrine, prépare le café et attend les premiers clients, qui arrivent toujours à la même heure.",
    "To make the dough, mix 500 grams of flour with 10 grams of salt, 5 grams of dry yeast and 320 millilitres of warm "
    "water. Knead it for ten minutes, cover the bowl, and let it rise until it has doubled in size.",
    "In 1687 Newton published the three laws of motion and the law of universal gravitation, from which he derived "
    "Kepler's laws of the planets, the tides, and the precession of the equinoxes.",
)


@dataclass(frozen=True)
class Samples:
    """Token ids (int64): `excerpts` (count, length), `prompts` (count, length), `windows` (count, length) or None.

    The log-probabilities of a window's tokens count from position `prefix` on (at least 1).
    """

    excerpts: torch.Tensor
    prompts: torch.Tensor
    windows: torch.Tensor | None
    prefix: int
    origin: str


def context_limit(subject: Subject) -> int:
    """Half the positions that the config says the model has: some keep a few back, and a continuation needs room."""
    config = subject.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return limit // 2 if isinstance(limit, int) and limit > 1 else sys.maxsize


def make_samples(subject: Subject, text: str | None, positions: int, tokens: int) -> Samples:
    """Samples from `text`, else from the built-in passages, else (without a tokenizer) random ids.

    `positions`: how many positions the excerpts should have; `tokens`: how many the windows should have. The windows
    start a quarter into the text. Raises `Refusal` where the text is too short, cannot be tokenised, or does not fit
    the model's positions.
    """
    limit = context_limit(subject)
    excerpt, prompt = min(EXCERPT, limit), min(PROMPT, limit)
    if subject.tokenizer is None:
        if text is not None:
            raise Refusal(f"{subject.name} has no tokenizer, so it cannot read the text; leave the text out")
        stream = _random_ids(subject, max(positions, PROMPTS * prompt))
        return _cut(stream, excerpt, prompt, positions, None, 1, "random token ids")
    if text is None:
        stream = _encode(subject, " ".join(PASSAGES))
        return _cut(stream, excerpt, prompt, positions, None, 1, BUILT_IN)
    start = len(text) // 4
    stream = _encode(subject, text[start : start + _CHARACTERS * max(tokens, positions)])
    if len(stream) < excerpt:
        raise Refusal(f"the text has only {len(text)} characters; give one of at least a few sentences")
    prefix = _prefix(subject)
    tokens = min(tokens, len(stream))
    window = min(WINDOW, limit - len(prefix), tokens)
    if window < max(1, 2 - len(prefix)):  # perplexity is of what follows the first token
        raise Refusal(
            f"{subject.name} has room for {limit} tokens, half its positions, too few for the perplexity of a text; "
            "leave the text out"
        )
    count = tokens // window
    windows = stream[: count * window].view(count, window)
    windows = torch.cat([prefix.expand(count, -1), windows], dim=1)
    return _cut(stream, excerpt, prompt, positions, windows, max(1, len(prefix)), "the text")


def _cut(
    stream: torch.Tensor,
    excerpt: int,
    prompt: int,
    positions: int,
    windows: torch.Tensor | None,
    prefix: int,
    origin: str,
) -> Samples:
    excerpts = _spread(stream, -(-positions // excerpt), excerpt)
    return Samples(excerpts, _spread(stream, PROMPTS, prompt), windows, prefix, origin)


def _spread(stream: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """At most `count` excerpts without overlap, evenly over the stream. Returns (count, length)."""
    length = min(length, len(stream))
    count = max(1, min(count, len(stream) // length))
    starts = torch.linspace(0, len(stream) - length, count).long()
    return torch.stack([stream[start : start + length] for start in starts])


def _encode(subject: Subject, text: str) -> torch.Tensor:
    return torch.tensor(subject.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def _prefix(subject: Subject) -> torch.Tensor:
    """The ids that the tokenizer puts before a text of its own accord, such as a beginning-of-sequence token."""
    special = set(subject.tokenizer.all_special_ids)
    return torch.tensor(list(takewhile(special.__contains__, subject.tokenizer("a")["input_ids"])), dtype=torch.int64)


def _random_ids(subject: Subject, count: int) -> torch.Tensor:
    """Ids below the vocabulary's size, the same every time, without those that the config gives a special role."""
    if subject.vocabulary is None:
        raise Refusal(f"{subject.name} has neither a tokenizer nor a vocabulary size; verify needs token ids to try")
    special = [
        id_ for key, id_ in subject.config.to_dict().items() if key.endswith("token_id") and isinstance(id_, int)
    ]
    ordinary = torch.arange(subject.vocabulary)
    ordinary = ordinary[~torch.isin(ordinary, torch.tensor(special, dtype=torch.int64))]
    generator = torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), (count,), generator=generator)]


def token_stream(subject: Subject, text: str | None, count: int) -> torch.Tensor:
    """`count` ids (count,) in a row: of `text` from a quarter on, of the built-in passages, or random ones.

    A text that is too short is read again from its start. Raises `Refusal` where there is a text and no tokenizer.
    """
    if subject.tokenizer is None:
        if text is not None:
            raise Refusal(f"{subject.name} has no tokenizer, so it cannot read the text; leave the text out")
        return _random_ids(subject, count)
    start = len(text) // 4 if text else 0
    ids = _encode(subject, text[start : start + _CHARACTERS * count] if text else " ".join(PASSAGES))
    if len(ids) == 0:
        raise Refusal("the text is empty; give one of at least a few sentences")
    return ids.repeat(-(-count // len(ids)))[:count]
