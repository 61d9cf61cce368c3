"""Image inputs for the types that place an image's features at placeholder tokens in the text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from tests.zoo.families import CannotBuild
from tests.zoo.tensors import BATCH, LENGTH, states, tokens

Inputs = dict[str, Any]
_GRID = (1, 4, 4)  # frames, rows and columns of patches

# Images in a row of the batch: an axis that most types do without; the second of two is a tile of the first.
_IMAGES_PER_ROW = {"idefics2": 1, "idefics3": 1, "smolvlm": 1}
_IMAGES_PER_ROW |= {"llava_next": 2, "llava_next_video": 2, "llava_onevision": 2}
_UNFLATTENED = frozenset({"kimi_k25", "paddleocr_vl"})  # patches as (count, 3, height, width)
# Types with arguments of their own about how an image was cut, which their image processor makes.
_OWN_FORM = frozenset(
    {
        "deepseek_vl_hybrid",
        "granite4_vision",
        "granite_docling",
        "inkling2",
        "inkling2_loop",
        "lfm2_vl",
        "llama4",
        "molmo2",
    }
)


def image_inputs(model: PreTrainedModel) -> Inputs:
    """Token ids and pixels, one image a row, for an image-text model: the tower runs and its features are used.

    Raises `CannotBuild` where the type takes its images in a form of its own.
    """
    features = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    no_tower = getattr(model.config, "vision_config", None) is None
    if features is None or no_tower or model.config.model_type in _OWN_FORM:
        raise CannotBuild("it takes its images in a form of its own")
    accepted = set(inspect.signature(model.forward).parameters)
    pixels = _pixels(model.config, set(inspect.signature(features).parameters) | accepted & {"image_merge_sizes"})
    token = _placeholder(model.config)
    text = tokens(LENGTH, seed=1)
    ids = torch.cat([text[:, :2], torch.full((BATCH, _count(features, pixels)), token), text[:, 2:]], dim=1)
    inputs: Inputs = {"input_ids": ids} | pixels
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = text
    types = (ids == token).long()
    return inputs | {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}


def _placeholder(config: PretrainedConfig) -> int:
    for name in ("image_token_id", "image_token_index", "image_patch_id"):
        if (token := getattr(config, name, None)) is not None:
            return token
    raise CannotBuild("its config names no image token")


def _pixels(config: PretrainedConfig, accepted: set[str]) -> Inputs:
    tower = config.vision_config
    if "image_position_ids" in accepted:
        positions = torch.cartesian_prod(torch.arange(_GRID[1]), torch.arange(_GRID[2]))
        patches = _patches(config).unflatten(0, (BATCH, -1))
        return {"pixel_values": patches, "image_position_ids": positions.expand(BATCH, -1, -1)}
    if "image_grid_thw" in accepted:
        merge = {"image_merge_sizes": torch.tensor([2] * BATCH)} if "image_merge_sizes" in accepted else {}
        return {"pixel_values": _patches(config), "image_grid_thw": torch.tensor([_GRID] * BATCH)} | merge
    size = getattr(tower, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    images = _IMAGES_PER_ROW.get(config.model_type, 0)
    inputs: Inputs = {"pixel_values": states(*([images] if images else []), 3, height, width, seed=8)}
    if "image_sizes" in accepted:
        inputs["image_sizes"] = torch.tensor([[height, width]] * BATCH)
    return inputs


def _patches(config: PretrainedConfig) -> torch.Tensor:
    """The patches of all images, (count, channels x frames x height x width)."""
    tower = config.vision_config
    frames, rows, columns = _GRID
    side = tower.patch_size
    depth = getattr(tower, "temporal_patch_size", getattr(tower, "patch_temporal", 1))
    patches = states(frames * rows * columns, 3 * depth, side, side, seed=8).flatten(0, 1)
    return patches if config.model_type in _UNFLATTENED else patches.flatten(1)


def _count(features: Callable[..., Any], pixels: Inputs) -> int:
    """How many feature vectors the tower makes of one image."""
    with torch.no_grad():
        output = features(**pixels)
    output = getattr(output, "pooler_output", output)
    parts = output if isinstance(output, (list, tuple)) else [output]
    return sum(part.numel() // part.shape[-1] for part in parts) // BATCH
