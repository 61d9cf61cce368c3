"""Small checkpoints written by hand, with every kind of file that a real folder has, and plans for them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from flashnorm.algebra import gain_factor
from flashnorm.checkpoint.plan import STRICT_MARK, FoldedSite, FoldPlan, Scale, TensorEdit
from flashnorm.checkpoint.source import Source

WIDTH, OUT, LAYERS, VOCABULARY = 48, 80, 3, 64
READERS = ("q_proj", "up_proj")


def random_weights(
    dtype: torch.dtype = torch.bfloat16, *, layers: int = LAYERS, width: int = WIDTH, out: int = OUT
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {"embed.weight": torch.randn(VOCABULARY, width, generator=generator)}
    for index in range(layers):
        weights[f"layers.{index}.norm.weight"] = 0.25 + torch.rand(width, generator=generator)
        for reader in READERS:
            weights[f"layers.{index}.{reader}.weight"] = torch.randn(out, width, generator=generator)
        weights[f"layers.{index}.down_proj.weight"] = torch.randn(width, out, generator=generator)
    weights["norm.weight"] = 0.25 + torch.rand(width, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def write_checkpoint(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, shards: int = 3, **config: object
) -> Path:
    """A folder with `shards` shards (1: a single file without an index), a config and all kinds of other files."""
    weights = random_weights() if weights is None else weights
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-5, **config}, indent=4))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"é": 1}}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}\r\n")
    (folder / "generation_config.json").write_text("{}")
    (folder / "LICENSE").write_bytes(b"\x00\xff any bytes")
    (folder / "empty").touch()
    (folder / "code").mkdir()
    (folder / "code" / "modeling_custom.py").write_text("X = 1\n")
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    write_shards(folder, weights, shards)
    return folder


def write_shards(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    weight_map = {}
    per_shard = -(-len(weights) // shards)
    names = list(weights)
    for number in range(shards):
        part = names[number * per_shard : (number + 1) * per_shard]
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in part}, folder / shard, metadata={"format": "pt", "note": "kept"})
        weight_map |= dict.fromkeys(part, shard)
    size = sum(tensor.nbytes for tensor in weights.values())
    parameters = sum(tensor.numel() for tensor in weights.values())
    index = {"metadata": {"total_size": size, "total_parameters": parameters}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def hand_plan(source: Source, *, strict: bool = False, layers: int = LAYERS) -> FoldPlan:
    """Every layer's norm into its two readers; the last norm is left alone."""
    edits: dict[str, TensorEdit] = {}
    sites = []
    for index in range(layers):
        gain = f"layers.{index}.norm.weight"
        readers = [f"layers.{index}.{reader}.weight" for reader in READERS]
        factor = gain_factor(source.read(gain), 0.0)
        edits |= dict.fromkeys(readers, TensorEdit(scales=(Scale(1, factor),)))
        edits[gain] = TensorEdit(remove=True) if strict else TensorEdit(fill=1.0)
        table: dict[str, tuple[int, torch.Tensor | None]] = dict.fromkeys(readers, (1, None))
        sites.append(FoldedSite(gain.removesuffix(".weight"), gain, None, "plain", 0.0, table))
    changed: dict[tuple[str, ...], object] = dict(STRICT_MARK) if strict else {}
    mode = "strict" if strict else "compatible"
    return FoldPlan(edits, {}, tuple(sites), {"norm": "the head is tied"}, mode, config_changes=changed)


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with the SHA-256 of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
