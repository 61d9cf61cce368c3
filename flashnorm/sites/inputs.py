"""Inputs that make a model of any kind run all of itself, in as few tokens as will do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flashnorm.sites.modalities import beside_text, channels, image, sound

_BATCH, _TOKENS = 2, 6


@dataclass(frozen=True)
class Run:
    """One forward call: of the whole model, or of the part called `module`."""

    inputs: dict[str, Any]
    module: str = ""


def main_runs(model: nn.Module, tokens: int = _TOKENS) -> list[Run]:
    """Calls of the whole model, the one on text that reaches most of it first; the first that goes through will do.

    Token ids are (2, tokens) int64, with one row for each codebook of an audio decoder; an encoder-decoder gets decoder
    ids of the same shape, a decoder with cross attention encoder states (2, tokens, width), and a model that insists
    on an image gets one. Calls with images, sound or page layout beside the text come last.
    """
    parameters = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    rows = _BATCH * (getattr(config, "num_codebooks", None) or 1 if "input_ids" in parameters else 1)
    inputs: dict[str, Any] = {"input_ids": token_ids(model, tokens, seed=1, rows=rows)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = token_ids(model, tokens, seed=2)
    if "shared_kv_states" in parameters:
        inputs = _speculative_inputs(config, tokens)
    if "pixel_values" in parameters and parameters["pixel_values"].default is inspect.Parameter.empty:
        inputs["pixel_values"] = image(config)
    if "use_cache" in parameters or "kwargs" in parameters:
        inputs["use_cache"] = False
    others = [Run(more) for more in beside_text(parameters, config, inputs)] if "input_ids" in inputs else []
    states = {name for name in ("encoder_hidden_states", "cross_attention_states") if name in parameters}
    if not states or "decoder_input_ids" in inputs or not _reads_encoder(model):
        return [Run(inputs), *others]
    width = _width(model)
    return [Run(inputs | {name: _states(tokens, width) for name in states}), Run(inputs), *others]


def one_row(run: Run) -> Run:
    """The same call on the first row of its batch alone: a classifier without a padding token takes no more."""
    rows = {
        name: value[: len(value) // _BATCH] if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in run.inputs.items()
    }
    return Run(rows, run.module)


def _speculative_inputs(config: Any, tokens: int) -> dict[str, Any]:
    """A speculative head takes one token's embedding from its target model, and the target's keys and values."""
    text = config.get_text_config()
    layers = {kind: text.per_layer_config[text.layer_types.index(kind)] for kind in sorted(set(text.layer_types))}
    return {
        "inputs_embeds": _states(1, 2 * config.backbone_hidden_size),
        "position_ids": torch.full((_BATCH, 1), tokens),
        "shared_kv_states": {
            kind: (_states(layer.num_key_value_heads, tokens, layer.head_dim),) * 2 for kind, layer in layers.items()
        },
    }


def part_runs(model: nn.Module, called: Iterable[str]) -> list[Run]:
    """Calls of the parts that text does not reach, each on its own: vision and audio towers.

    `called`: the modules that ran so far. A part whose inputs cannot be told from its signature and config is left out.
    """
    ran = set(called)
    runs: list[Run] = []
    for name, module in model.named_modules():
        if not name or name in ran or not isinstance(module, PreTrainedModel):
            continue
        if any(name.startswith(f"{run.module}.") for run in runs):
            continue
        inputs = _tower_inputs(module)
        if inputs is not None:
            runs.append(Run(inputs, name))
    return runs


def _tower_inputs(tower: PreTrainedModel) -> dict[str, Any] | None:
    parameters, config = inspect.signature(tower.forward).parameters, tower.config
    if "grid_thw" in parameters and hasattr(config, "patch_size"):
        # Patches of one image in rows, as the Qwen-VL processors lay them out.
        side = 2 * getattr(config, "spatial_merge_size", 1)
        values = channels(config) * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        patches = torch.randn(side * side, values, generator=torch.Generator().manual_seed(4))
        return {next(iter(parameters)): patches, "grid_thw": torch.tensor([[1, side, side]])}
    if "pixel_values" in parameters and (pixels := image(config)) is not None:
        return {"pixel_values": pixels}
    if "input_features" in parameters and (bins := sound(config, _TOKENS)) is not None:
        return {"input_features": bins}
    return None


def _reads_encoder(model: nn.Module) -> bool:
    """Cross attention is there to be run: by the config, or by a module of that name."""
    config = getattr(model, "config", None)
    names = ("encoder_attn", "cross_attn", "crossattention")
    return bool(getattr(config, "add_cross_attention", False)) or any(
        part in name for name, _ in model.named_modules() for part in names
    )


def _width(model: nn.Module) -> int:
    """The width of the encoder states that cross attention expects: the config's, else that of the embeddings."""
    config = model.config
    own = getattr(config, "cross_attention_hidden_size", None)
    return int(own or _embedding(model).shape[1])


def _states(*shape: int) -> torch.Tensor:
    return torch.randn(_BATCH, *shape, generator=torch.Generator().manual_seed(3))


def token_ids(model: nn.Module, tokens: int, seed: int, rows: int = _BATCH) -> torch.Tensor:
    """Ordinary tokens: from the middle of the vocabulary, away from the special ids at either end."""
    vocabulary = _vocabulary_size(model)
    low, high = min(5, vocabulary - 1), max(vocabulary * 3 // 4, min(6, vocabulary))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (rows, tokens), generator=generator)


def _vocabulary_size(model: nn.Module) -> int:
    return int(_embedding(model).shape[0])


def _embedding(model: nn.Module) -> torch.Tensor:
    """The table of token embeddings, (vocabulary, width); the smallest one where the model does not say which it is."""
    get: Any = getattr(model, "get_input_embeddings", None)
    try:
        weight = getattr(get(), "weight", None) if get is not None else None
    except (AttributeError, NotImplementedError):  # not every model says which of its tables it is
        weight = None
    if isinstance(weight, torch.Tensor):
        return weight
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return min(tables, key=len) if tables else torch.empty(32, 1)
