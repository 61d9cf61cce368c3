"""Stock Transformers takes a folded trained model for an ordinary one and continues as the source does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import flashnorm
from tests.clients.greedy import PROMPTS, TOKENS, Step, compare, near_tie

pytestmark = pytest.mark.xdist_group("transformers client")  # one process makes the fixtures


@pytest.fixture(scope="module")
def folded(smollm2_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("clients") / "folded"
    flashnorm.fold_checkpoint(smollm2_bf16, out)
    return out


@pytest.fixture(scope="module")
def source(smollm2_bf16: Path) -> list[list[Step]]:
    return _generate(smollm2_bf16)


@pytest.fixture(scope="module")
def bound(smollm2_bf16: Path, source: list[list[Step]]) -> float:
    return near_tie(_generate(smollm2_bf16, torch.float32), source)


def _generate(folder: Path, dtype: torch.dtype = torch.bfloat16) -> list[list[Step]]:
    """Continuations of all prompts in one batch: a step then costs hardly more than one of a single prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    answer = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = answer.sequences[:, inputs["input_ids"].shape[1] :]
    return [_steps(row, [logits[i] for logits in answer.logits]) for i, row in enumerate(tokens.tolist())]


def _steps(tokens: list[int], logits: list[torch.Tensor]) -> list[Step]:
    steps = []
    for token, row in zip(tokens, logits, strict=True):
        likeliest = row.float().log_softmax(-1).topk(5)
        steps.append(Step(token, dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))))
    return steps


def test_generate_continues_as_the_source(source: list[list[Step]], folded: Path, bound: float) -> None:
    for prompt, ours, theirs in zip(PROMPTS, source, _generate(folded), strict=True):
        comparison = compare(ours, theirs, bound)
        print(f"{prompt!r}: {comparison}")
        assert comparison.accepted, str(comparison)


def test_generate_shows_a_fault(
    source: list[list[Step]], smollm2_bf16: Path, folded: Path, bound: float, tmp_path: Path
) -> None:
    """The same judge refuses a fold that left one norm's gain in place, so that it is applied twice."""
    model = AutoModelForCausalLM.from_pretrained(folded, dtype=torch.bfloat16)
    gain = "model.layers.0.input_layernorm.weight"
    with safe_open(smollm2_bf16 / "model.safetensors", "pt") as tensors:
        model.get_parameter(gain).data.copy_(tensors.get_tensor(gain))
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folded).save_pretrained(tmp_path)
    faulty = _generate(tmp_path)
    assert not all(compare(ours, theirs, bound).accepted for ours, theirs in zip(source, faulty, strict=True))


def test_a_chat_pipeline_answers(folded: Path) -> None:
    chat = pipeline("text-generation", model=str(folded), dtype=torch.bfloat16)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = chat(messages, do_sample=False, max_new_tokens=16)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    assert "Paris" in answer["content"]
