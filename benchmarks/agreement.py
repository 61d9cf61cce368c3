"""Is text from a decode program as near to the model in fp32 as text from the stock model is? Step by step.

    python -m benchmarks.agreement RECORD.json [--alone 256] [--together 1792] [--device cpu]

SmolLM2-135M in bf16 generates greedily through a decode program, one sequence by itself and sixteen of unequal length
together. On the very tokens that came out, the logits of every step are compared with those of the model in fp32: the
divergence of the distributions, KL(fp32 ‖ bf16), and whether the likeliest token is the same. So are the stock bf16
model's, on the same tokens. `alone`, `together`: how many tokens each of the two runs generates in all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashnorm
from examples.assets import sotu_text
from flashnorm.bench.record import provenance, write
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.verify.subject import open_subject
from tests.conftest import _imported

ALONE, RAGGED = (64,), tuple(range(16, 16 + 12 * 16, 12))  # tokens of the prompts
CHUNK = 256  # positions whose distributions are compared at once


@dataclass(frozen=True)
class Text:
    """A sequence (tokens,), and the logits (steps, vocabulary) that chose its last tokens but one each."""

    ids: Tensor
    logits: Tensor

    @property
    def first(self) -> int:
        """The position that the first of the logits belongs to."""
        return len(self.ids) - 1 - len(self.logits)


@torch.inference_mode()
def generate(model: nn.Module, prompts: Sequence[list[int]], steps: int) -> list[Text]:
    """Greedy text of all prompts together, through a decode program, with every step's logits."""
    longest = max(map(len, prompts)) + steps + 1
    with torch.inference_mode(False):
        program = Program(read_spec(model, max_length=longest), slots=len(prompts))
    slots = range(len(prompts))
    texts = [list(prompt) for prompt in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for slot in slots:
        texts[slot].append(int(program.prefill(slot, prompts[slot]).argmax()))
    for _ in range(steps):
        following = program.decode({slot: texts[slot][-1] for slot in slots})
        for slot in slots:
            logits[slot].append(following[slot].cpu())
            texts[slot].append(int(following[slot].argmax()))
    program.close()
    return [Text(torch.tensor(text), torch.stack(rows)) for text, rows in zip(texts, logits, strict=True)]


@torch.inference_mode()
def stock_logits(model: Any, text: Text) -> Tensor:
    """What the model itself says at the steps' positions, uncached: (steps, vocabulary) fp32."""
    logits: Tensor = model(text.ids[None, :-1].to(model.device), use_cache=False).logits[0, text.first :]
    return logits.float().cpu()


@dataclass(frozen=True)
class Distance:
    """From fp32, over all steps: mean KL divergence in nats, and the share of steps with the same likeliest token."""

    divergence: float
    same_token: float


def distance(exact: Tensor, other: Tensor) -> Distance:
    """Both (steps, vocabulary)."""
    divergence, same = 0.0, 0
    for left, right in zip(exact.split(CHUNK), other.split(CHUNK), strict=True):
        wanted, given = (t.double().log_softmax(-1) for t in (left, right))
        divergence += float((wanted.exp() * (wanted - given)).sum())
        same += int((left.argmax(-1) == right.argmax(-1)).sum())
    return Distance(divergence / len(exact), same / len(exact))


def compare(name: str, texts: Sequence[Text], half: nn.Module, exact: nn.Module) -> dict[str, Any]:
    """One row of the record."""
    wanted = torch.cat([stock_logits(exact, text) for text in texts])
    program = distance(wanted, torch.cat([text.logits for text in texts]))
    stock = distance(wanted, torch.cat([stock_logits(half, text) for text in texts]))
    return {
        "name": name,
        "prompts": [text.first for text in texts],
        "steps": len(wanted),
        "program": vars(program),
        "stock": vars(stock),
        "divergence_ratio": program.divergence / stock.divergence,
    }


def measure(record: Path, alone: int, together: int, device: torch.device) -> dict[str, Any]:
    command = f"python -m benchmarks.agreement --alone {alone} --together {together} --device {device}"
    table: dict[str, Any] = {
        "kind": "agreement",
        "provenance": provenance(device, command, None),
        "model": "SmolLM2-135M-Instruct, bf16",
        "rows": [],
    }
    folder = _imported(torch.bfloat16)
    half, exact = (flashnorm.load(folder, dtype=d).to(device) for d in (torch.bfloat16, torch.float32))
    words = open_subject(folder).tokenizer(sotu_text()[:100_000])["input_ids"]
    runs = (("one sequence", ALONE, alone), ("sixteen of unequal length", RAGGED, together))
    for name, lengths, tokens in runs:
        prompts = [words[1000 * n : 1000 * n + length] for n, length in enumerate(lengths)]
        texts = generate(half, prompts, -(-tokens // len(prompts)))
        table["rows"].append(compare(name, texts, half, exact))
        print(table["rows"][-1], flush=True)
        write(table, record)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--alone", type=int, default=256)
    parser.add_argument("--together", type=int, default=1792)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    measure(arguments.record, arguments.alone, arguments.together, arguments.device)


if __name__ == "__main__":
    main()
