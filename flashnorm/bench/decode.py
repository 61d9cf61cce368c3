"""Tokens per second of a decode program, against the time that reading its bytes takes at least."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.bench.clock import timed
from flashnorm.bench.limits import measure_ceilings
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.sampling import Sampling
from flashnorm.runtime.decode.spec import Spec, linears_of

_WARMUP = 8
_GREEDY = Sampling()
_COMMON = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}

# Name -> Transformers' config class and the published sizes; weights are random.
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama-3.2-1b": (
            "LlamaConfig",
            _COMMON
            | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
        ),
        "llama-3.1-8b": (
            "LlamaConfig",
            _COMMON
            | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False},
        ),
        "smollm2-135m": (
            "LlamaConfig",
            _COMMON
            | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
            | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
        ),
        "qwen3-1.7b": (
            "Qwen3Config",
            {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
            | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
            | {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6},
        ),
    }
)


@dataclass(frozen=True)
class DecodeSpeed:
    """What was measured. Times in microseconds; `limit_us`: reading all weights and the mean context once, or None."""

    rows: int
    context: tuple[int, int]  # at the first and at the last step
    step_us: tuple[float, ...]  # the mean step of each run
    bytes_per_step: int
    limit_us: float | None

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together, in the median run."""
        return 1e6 * self.rows / statistics.median(self.step_us)

    def __str__(self) -> str:
        median, spread = statistics.median(self.step_us), max(self.step_us) - min(self.step_us)
        share = "" if self.limit_us is None else f", {100 * self.limit_us / median:.1f}% of the bandwidth limit"
        return (
            f"{self.rows} rows, context {self.context[0]} to {self.context[1]}: {self.tokens_per_second:,.0f} tokens/s "
            f"({median:.1f} us a step, range {spread:.1f} over {len(self.step_us)} runs{share})"
        )


def random_model(shape: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of one of `SHAPES` with random weights, in eval mode, made on the device itself."""
    import transformers

    config, sizes = SHAPES[shape]
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes), dtype=dtype)
    return made.eval()


def tokens_per_second(
    model: nn.Module,
    *,
    rows: int = 1,
    prompt: int = 256,
    tokens: int = 512,
    repeats: int = 5,
    sampling: Sampling | None = None,
    bytes_per_us: float | None = None,
    **options: Any,
) -> DecodeSpeed:
    """Time `repeats` runs of `tokens` steps of `rows` sequences, each after a random prompt of `prompt` tokens.

    Every step is a whole one: choosing the next token included, tokens fed back on the device. `bytes_per_us`: the read
    bandwidth for the limit, measured when not given, on a CUDA device only. `options`: of `Program`, such as
    `graphs=False`. Raises what `read_spec` and `Program` raise.
    """
    length = prompt + tokens + _WARMUP
    spec = read_spec(model, max_length=length)
    program = Program(spec, slots=rows, **options)
    active = tuple(range(rows))
    runs = []
    try:
        for run in range(repeats):
            fill(program, random_prompts(spec.embedding.shape[0], rows, prompt, seed=run), sampling or Sampling())
            runs.append(timed(lambda: program.advance(active), tokens, spec.device, lead=_WARMUP))
    finally:
        program.close()
    if bytes_per_us is None and spec.device.type == "cuda":
        bytes_per_us = measure_ceilings(spec.device).bytes_per_us
    context = prompt + _WARMUP, length
    moved = bytes_per_step(spec, rows, sum(context) // 2)
    return DecodeSpeed(rows, context, tuple(runs), moved, None if bytes_per_us is None else moved / bytes_per_us)


def bytes_per_step(spec: Spec, rows: int, context: int) -> int:
    """Every weight once, and every row's keys and values of `context` tokens, or of the window where it is shorter."""
    linears = [linear for layer in spec.layers for linear in linears_of(layer)]
    weights = sum(linear.weight.numel() for linear in (*linears, spec.head.linear))
    cached = 0
    for layer in spec.layers:
        a = layer.attention
        cached += 2 * a.kv_heads * a.head_dim * min(context, a.window or context)
    return (weights + rows * cached) * spec.dtype.itemsize


def random_prompts(vocabulary: int, rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids (rows, length) int64 on the CPU."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def fill(program: Program, prompts: Tensor, sampling: Sampling = _GREEDY) -> Tensor:
    """Let the first slots hold these prompts (rows, length) anew; returns the logits (rows, vocabulary) after them."""
    logits = []
    for slot, ids in enumerate(prompts):
        if slot not in program.free_slots():
            program.free(slot)
        logits.append(program.prefill(slot, ids, sampling))
    return torch.stack(logits)
