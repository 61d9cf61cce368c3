"""The completions protocol of OpenAI, vLLM, SGLang and llama.cpp: what is asked, and what comes back."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashnorm.errors import Refusal

Prompt = str | Sequence[int]
_TOKEN_ID = re.compile(r"token_id:(\d+)$")
_SHOWN = 200  # characters of a server's complaint


def token_id(name: str) -> int | None:
    """The id in a name such as "token_id:7"; None where the name is a text."""
    match = _TOKEN_ID.match(name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class Answer:
    """Tokens as the server names them, and for each the likeliest tokens there with their log-probabilities (nats).

    With `echo` the prompt's tokens come first; the first of them has nothing before it, so its entry is empty.
    """

    tokens: tuple[str, ...]
    steps: tuple[dict[str, float], ...]

    @property
    def ids(self) -> list[int] | None:
        """The tokens' ids, where the server names tokens by them (vLLM's `return_tokens_as_token_ids`)."""
        found = [token_id(token) for token in self.tokens]
        known = [number for number in found if number is not None]
        return known if len(known) == len(found) else None


@dataclass(frozen=True)
class Client:
    """One model behind one address. `url`: up to and with `/v1`. `top`: how many likeliest tokens are asked for.

    Every call raises `Refusal`, with the server's own words, where the server cannot be reached or does not answer.
    """

    url: str
    model: str
    top: int = 5
    timeout: float = 120.0  # seconds for one answer

    def complete(self, prompt: Prompt, tokens: int, *, echo: bool = False) -> Answer:
        """Continue `prompt` greedily by `tokens`."""
        return self.complete_all([prompt], tokens, echo=echo)[0]

    def complete_all(self, prompts: Sequence[Prompt], tokens: int, *, echo: bool = False) -> list[Answer]:
        """The same for several prompts in one request, in their order."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompts) if len(prompts) > 1 else prompts[0],
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": self.top,
            "seed": 0,
        }
        if echo:
            body["echo"] = True
        if not isinstance(prompts[0], str):
            body["return_tokens_as_token_ids"] = True
        choices = self._post("/completions", body).get("choices")
        if not isinstance(choices, list) or len(choices) != len(prompts):
            raise Refusal(f"{self.url} answered {len(prompts)} prompts with something else than as many choices")
        return [self._answer(choice) for choice in sorted(choices, key=lambda choice: choice.get("index", 0))]

    def _answer(self, choice: dict[str, Any]) -> Answer:
        logprobs = choice.get("logprobs") or {}
        tokens, top = logprobs.get("tokens"), logprobs.get("top_logprobs")
        if not tokens or not top or len(tokens) != len(top):
            raise Refusal(
                f"{self.url} gives no log-probabilities of the likeliest tokens; start the server so that it does "
                "(`logprobs` of /v1/completions)"
            )
        return Answer(tuple(tokens), tuple(self._likeliest(step or {}) for step in top))

    def _likeliest(self, step: dict[str, Any]) -> dict[str, float]:
        """Without the token that was given or drawn, which servers add where it is not among the likeliest."""
        ordered = sorted(((name, float(value)) for name, value in step.items()), key=lambda pair: -pair[1])
        return dict(ordered[: self.top])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        address, headers = self.url.rstrip("/") + path, {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(address, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:_SHOWN]
            raise Refusal(f"{self.url} refused a completion of {self.model} (status {error.code}): {words}") from error
        except (OSError, ValueError) as error:  # unreachable, timed out, no JSON, no address at all
            raise Refusal(f"{self.url} cannot be asked: {getattr(error, 'reason', error)}") from error
        if not isinstance(answer, dict):
            raise Refusal(f"{self.url} answered with something else than a JSON object; is it a completions server?")
        return answer
