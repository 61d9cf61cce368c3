"""A small completions server on a tiny model, in this process, and a proxy before it that plants faults."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

Handle = Callable[[dict[str, Any]], dict[str, Any]]


class Refused(Exception):
    """Answered with status 400."""


@contextmanager
def serving(handle: Handle) -> Iterator[str]:
    """The address, up to `/v1`, of a server that answers `POST /v1/completions` with `handle(body)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, answer = 200, handle(body)
            except Refused as error:
                status, answer = 400, {"error": str(error)}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sure(model: nn.Module) -> nn.Module:
    """`model` with logits as far apart as a trained one's: random ones make all tokens nearly equally likely."""
    model.model.norm.weight.data *= 4
    return model


def completions(model: nn.Module, *, echoes: bool = True, tokenizer: Any = None) -> Handle:
    """Greedy completions of a model with its cache; ids in and "token_id:7" out, or text with a tokenizer."""
    lock = threading.Lock()

    def handle(body: dict[str, Any]) -> dict[str, Any]:
        if body["model"] != "tiny":
            raise Refused(f"the model {body['model']} does not exist")
        if body.get("echo") and not echoes:
            raise Refused("echo is not supported")
        prompt = body["prompt"]
        prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        with lock:
            choices = [_choice(model, tokenizer, given, body) | {"index": i} for i, given in enumerate(prompts)]
        return {"choices": choices[::-1]}  # in any order: the index tells

    return handle


@torch.inference_mode()
def _choice(model: nn.Module, tokenizer: Any, prompt: Any, body: dict[str, Any]) -> dict[str, Any]:
    def name(token: int) -> str:
        return tokenizer.decode([token]) if tokenizer else f"token_id:{token}"

    def likeliest(logits: torch.Tensor) -> dict[str, float]:
        values, tokens = logits.float().log_softmax(-1).topk(body["logprobs"])
        return {name(int(token)): float(value) for token, value in zip(tokens, values, strict=True)}

    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([ids]), past_key_values=cache).logits[0]
    tokens, steps = [], []
    if body.get("echo"):
        tokens = [name(token) for token in ids]
        given = ({name(t): float(row.float().log_softmax(-1)[t])} for t, row in zip(ids[1:], logits, strict=False))
        steps = [None, *(own | likeliest(row) for own, row in zip(given, logits[:-1], strict=True))]
    for _ in range(body["max_tokens"]):
        token = int(logits[-1].argmax())
        tokens.append(name(token))
        steps.append(likeliest(logits[-1]))
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0]
    return {"logprobs": {"tokens": tokens, "top_logprobs": steps}}


def proxy(url: str, change: Callable[[int, dict[str, Any], dict[str, Any]], None]) -> Handle:
    """Passes requests on to `url`; `change(number, body, answer)` may change each answer in place."""
    count = iter(range(10**9))

    def handle(body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        change(next(count), body, answer)
        return answer

    return handle


def late_by_one_step(number: int, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """The log-probabilities of generated answers are those of the step before; one-token answers are as they are."""
    for choice in answer["choices"]:
        steps = choice["logprobs"]["top_logprobs"]
        if body["max_tokens"] > 1:
            choice["logprobs"]["top_logprobs"] = [steps[0], *steps[:-1]]


def late_once(number: int, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """One step of the generated answer, the tenth, has the log-probabilities of the step before."""
    for choice in answer["choices"]:
        steps = choice["logprobs"]["top_logprobs"]
        if len(steps) > 10:
            steps[10] = steps[9]


def other_among_others(number: int, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """In a request of several prompts each gets its neighbour's probabilities."""
    choices = answer["choices"]
    if len(choices) > 1:
        logprobs = [choice["logprobs"] for choice in choices]
        for choice, other in zip(choices, [*logprobs[1:], logprobs[0]], strict=True):
            choice["logprobs"] = other


def other_every_time(number: int, body: dict[str, Any], answer: dict[str, Any]) -> None:
    """Every second answer is less sure of itself."""
    if number % 2:
        for choice in answer["choices"]:
            for step in choice["logprobs"]["top_logprobs"]:
                for token in step or {}:
                    step[token] -= 1.0
