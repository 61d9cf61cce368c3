"""Opening an adapter folder: what is plain LoRA, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashnorm.checkpoint.adapter import CONFIG, NOTE, WEIGHTS, Note, note_bytes, open_adapter
from flashnorm.errors import CheckpointError

MODULE = "base_model.model.layers.0.q_proj"


def _write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, **config}))
    save_file({**_factors(), **(tensors or {})}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _factors(module: str = MODULE) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(2, 6), f"{module}.lora_B.weight": torch.ones(4, 2)}


def test_tensors_are_sorted_out(tmp_path: Path) -> None:
    others = {
        f"{MODULE}.lora_B.bias": torch.ones(4),
        f"{MODULE}.base_layer.bias": torch.ones(4),
        "base_model.model.wte.lora_embedding_A": torch.ones(2, 9),
        "base_model.model.wte.lora_embedding_B": torch.ones(6, 2),
        "base_model.model.wte.base_layer.weight": torch.ones(9, 6),
        "base_model.model.wte.token_adapter.trainable_tokens_delta": torch.ones(1, 6),
        "base_model.model.lm_head.weight": torch.ones(9, 6),
        "base_model.model.experts.base_layer.lora_A.weight": torch.ones(8, 6),
        "base_model.model.experts.base_layer.lora_B.weight": torch.ones(4, 8),
    }
    adapter = open_adapter(_write(tmp_path / "adapter", others))
    assert adapter.factors == {
        "layers.0.q_proj": {role: f"{MODULE}.{role}" for role in ("lora_A.weight", "lora_B.weight", "lora_B.bias")},
        "wte": {role: f"base_model.model.wte.{role}" for role in ("lora_embedding_A", "lora_embedding_B")},
        "experts.base_layer": {
            role: f"base_model.model.experts.base_layer.{role}" for role in ("lora_A.weight", "lora_B.weight")
        },
    }
    assert adapter.copies == {
        "layers.0.q_proj.bias": f"{MODULE}.base_layer.bias",
        "wte.weight": "base_model.model.wte.base_layer.weight",
        "lm_head.weight": "base_model.model.lm_head.weight",
    }
    assert adapter.tokens == {"wte": "base_model.model.wte.token_adapter.trainable_tokens_delta"}
    assert (adapter.metadata, adapter.note) == ({"format": "pt"}, None)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_ways_of_starting_that_leave_the_base_alone(start: object, tmp_path: Path) -> None:
    open_adapter(_write(tmp_path / "adapter", init_lora_weights=start))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "of type IA3; only LORA"),
        ({"peft_type": None}, "of type None"),
        ({"use_dora": True}, "sets use_dora: DoRA divides by the norms"),
        ({"use_qalora": True}, "sets use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "sets use_bdlora"),
        ({"kasa_config": {"beta": 1}}, "sets kasa_config"),
        ({"arrow_config": {"top_k": 3}}, "sets arrow_config"),
        ({"monteclora_config": {"n": 1}}, "sets monteclora_config"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "sets layer_replication"),
        ({"megatron_config": {"a": 1}}, "sets megatron_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights to 'pissa_niter_4', with which PEFT may change"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    ],
)
def test_other_kinds_of_adapter(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_adapter(_write(tmp_path / "adapter", **config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{MODULE}.lora_magnitude_vector": torch.ones(4)}, "is no name that PEFT gives to plain LoRA"),
        ({f"{MODULE}.lora_A.default.weight": torch.ones(2, 6)}, "is no name that PEFT gives to plain LoRA"),
        ({"layers.0.q_proj.weight": torch.ones(4, 6)}, "is no name that PEFT gives to plain LoRA"),
        ({"base_model.model.k_proj.lora_A.weight": torch.ones(2, 6)}, r"only \['lora_A.weight'\] of 'k_proj'"),
        ({f"{MODULE}.lora_A.weight": torch.full((2, 6), torch.nan)}, "holds NaN or infinity in '.*lora_A.weight'"),
        ({f"{MODULE}.lora_B.weight": torch.full((4, 2), -torch.inf)}, "holds NaN or infinity in '.*lora_B.weight'"),
        (
            {f"{MODULE}.lora_A.weight": torch.ones(2, 6, dtype=torch.int8)},
            "as torch.int8; save the adapter unquantised",
        ),
    ],
)
def test_tensors_that_are_not_plain_lora(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_adapter(_write(tmp_path / "adapter", tensors))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, None, "has no adapter_config.json; give a LoRA adapter folder"),
        (CONFIG, b"{", "is not valid JSON"),
        (WEIGHTS, None, "has no adapter_model.safetensors; download or save the whole adapter"),
        (WEIGHTS, b"\x00" * 4, "truncated or corrupt"),
        ("checkpoint-1/adapter_model.safetensors", b"", "a second adapter in 'checkpoint-1/adapter_model.safetensors'"),
        ("adapter_model.bin", b"", "a second adapter in 'adapter_model.bin'"),
        (NOTE, b'{"side": "both", "fingerprint": "", "base": null, "revision": null}', "is not a note"),
        (NOTE, b'{"side": "folded"}', "is not a note"),
        (
            NOTE,
            b'{"side": "folded", "fingerprint": "", "base": null, "revision": null, "schema_version": 2}',
            "is not a",
        ),
    ],
)
def test_folders_that_are_not_whole(file: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    folder = _write(tmp_path / "adapter")
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_adapter(folder)


def test_a_bin_adapter_alone(tmp_path: Path) -> None:
    folder = _write(tmp_path / "adapter")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="load the adapter with PEFT and `save_pretrained` it"):
        open_adapter(folder)


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = _write(tmp_path / "adapter")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_adapter(folder)


def test_the_note_is_read_back(tmp_path: Path) -> None:
    folder = _write(tmp_path / "adapter")
    note = Note("folded", "0f", "some/model", None)
    (folder / NOTE).write_bytes(note_bytes(note))
    assert open_adapter(folder).note == note
