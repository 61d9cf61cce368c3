"""Tiny GGUF files, written the way llama.cpp converts a Transformers model: the inverse of what an import must undo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = ("<unk>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def vocabulary() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's spelling and two merges."""
    return [*SPECIAL_TOKENS, *bytes_to_unicode().values(), "th", "the"]


def tiny_llama(**changes: Any) -> PreTrainedModel:
    """A random Llama, fp32, gains around one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": len(vocabulary())} | changes))
    return _with_random_gains(model, mean=1.0)


def tiny_gemma(head_dim: int = 256) -> PreTrainedModel:
    """A random Gemma 2, fp32: one-plus gains, stored around zero."""
    torch.manual_seed(0)
    # A GGUF does not state the attention scale: it is the default, 256, so the heads are that wide.
    sizes = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    config = Gemma2Config(**sizes, vocab_size=len(vocabulary()))
    return _with_random_gains(Gemma2ForCausalLM(config), mean=0.0)


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: bool = True,
    metadata: dict[str, str | int] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: str | None = None,
) -> Path:
    """Write `model` (Llama or Gemma 2) as llama.cpp would; matrices in `quantization`, norms in fp32.

    `metadata`, `tensors`: added as they are. `without`: the GGUF name of a tensor to leave out.
    """
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    _add_sizes(writer, model.config)
    if tokenizer:
        _add_tokenizer(writer)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint16(key, value)
    for name, value in gguf_tensors(model).items():
        if name != without:
            kind = quantization if value.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """GGUF name -> fp32 value, with q and k permuted for Llama and one added to Gemma's norms."""
    config = model.config
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    values = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        value = parameter.detach().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            value = _interleave_rotary_halves(value, heads)
        if config.model_type == "gemma2" and name.endswith("norm.weight"):
            value = value + 1
        values[names.get_name(name, try_suffixes=(".weight",))] = np.ascontiguousarray(value)
    return values


def _interleave_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _with_random_gains(model: PreTrainedModel, mean: float) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    return model.eval()


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in tokens])
    writer.add_token_merges(["t h", "th e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
