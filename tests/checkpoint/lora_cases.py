"""Tiny folded models and random adapters for them.

Every gain is plus or minus a power of two, so that folding and translating an RMSNorm model round nothing: in fp64 the
logits before and after differ by the arithmetic of the forward pass alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

from flashnorm.checkpoint.fold import fold_checkpoint

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@dataclass(frozen=True)
class Case:
    """A model class, its config, and what to adapt. `exact`: whether translation rounds nothing."""

    model: str
    config: str
    settings: dict[str, Any]
    adapter: dict[str, Any]
    exact: bool = True
    loading: dict[str, Any] = field(default_factory=dict)


_EAGER = {"experts_implementation": "eager"}  # the grouped matmul has no fp64
CASES = {
    "llama": Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        SMALL,
        {
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 3},
            "alpha_pattern": {"q_proj": 5},
        },
    ),
    "gemma3": Case("Gemma3ForCausalLM", "Gemma3TextConfig", SMALL, {"target_modules": "all-linear"}),  # one-plus, tied
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", SMALL, {"target_modules": "all-linear"}),  # fused projections
    "mixtral": Case(  # experts stored one by one, stacked (out, in) in the model
        "MixtralForCausalLM",
        "MixtralConfig",
        {**SMALL, "num_local_experts": 4},
        {"target_modules": ["k_proj"], "target_parameters": [*_EXPERTS, "gate.weight"]},
        loading=_EAGER,
    ),
    "gpt_oss": Case(  # experts stacked (in, out)
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
        {"target_modules": ["k_proj"], "target_parameters": [*_EXPERTS, "router.weight"]},
        loading=_EAGER,
    ),
    "gpt2": Case(  # LayerNorm whose bias moves, weights stored (in, out)
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": 32,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {
            "target_modules": ["c_attn", "c_fc", "c_proj"],
            "bias": "lora_only",
            "fan_in_fan_out": True,
            "init_lora_weights": "gaussian",
        },
        exact=False,
    ),
}


def write_base(case: Case, folder: Path, **changes: Any) -> Path:
    """Save the case's model with random weights and power-of-two gains, fp32."""
    model = getattr(hf, case.model)(getattr(hf, case.config)(**{**case.settings, **changes}))
    randomise(model)
    model.save_pretrained(folder)
    return folder


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name or ".ln_" in name:
            powers = 2.0 ** torch.randint(-1, 2, parameter.shape, generator=generator)
            signs = 1.0 - 2.0 * (torch.rand(parameter.shape, generator=generator) < 0.25)
            one_plus = float("Gemma" in type(model).__name__)
            value = torch.randn(parameter.shape, generator=generator) if "bias" in name else powers * signs - one_plus
        else:
            value = 0.4 * torch.randn(parameter.shape, generator=generator)
        parameter.data = value.to(parameter.dtype)


def write_adapter(case: Case, base: Path, folder: Path, **changes: Any) -> Path:
    """Save a random adapter for the model in `base`, as PEFT does."""
    model = get_peft_model(load(case, base, torch.float32), LoraConfig(r=2, **{**case.adapter, **changes}))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    embeddings = "embed_tokens" in model.peft_config["default"].target_modules  # what "auto" does, without its warning
    model.save_pretrained(folder, save_embedding_layers=embeddings)
    return folder


def load(case: Case, base: Path, dtype: torch.dtype) -> torch.nn.Module:
    return getattr(hf, case.model).from_pretrained(base, dtype=dtype, **case.loading).eval()


def logits(case: Case, base: Path, adapter: Path) -> torch.Tensor:
    """Logits of base and adapter together, as PEFT computes them, fp64."""
    model = PeftModel.from_pretrained(load(case, base, torch.float64), adapter).double().eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None] * 5 % 32).logits


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Folded:
    """A case on disk: the base, its folded form, and an adapter for the one that it was `trained_on`."""

    case: Case
    base: Path
    folded: Path
    adapter: Path


def write_case(name: str, folder: Path) -> Folded:
    case = CASES[name]
    base = write_base(case, folder / "base")
    fold_checkpoint(base, folder / "folded")
    return Folded(case, base, folder / "folded", write_adapter(case, base, folder / "adapter"))
