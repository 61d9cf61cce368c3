"""Inputs of the types that cannot be run on token ids alone, by the config's model type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.zoo.tensors import BATCH, DECODER_LENGTH, ENCODER_LENGTH, LENGTH, states, tokens

Inputs = dict[str, Any]


def cross_attention_states(model: PreTrainedModel) -> Inputs:
    """Encoder states, (2, 5, width), for a decoder that has cross attention; empty for any other."""
    names = ("encoder_attn", "cross_attn", "crossattention")
    takes_states = "encoder_hidden_states" in inspect.signature(model.forward).parameters
    if not takes_states or not any(part in name for name, _ in model.named_parameters() for part in names):
        return {}
    width = getattr(model.config, "cross_attention_hidden_size", None) or model.config.hidden_size
    return {"encoder_hidden_states": states(ENCODER_LENGTH, width, seed=3)}


def _pixels(model: PreTrainedModel) -> torch.Tensor:
    config = model.config.vision_config if hasattr(model.config, "vision_config") else model.config.encoder
    size = config.image_size
    return states(3, *(size if isinstance(size, (list, tuple)) else (size, size)), seed=8)


def _speculative(model: PreTrainedModel) -> Inputs:
    """One token's embedding from the model that it speculates for, whose keys and values stand in for its own."""
    text = model.config.get_text_config()
    shared = {}
    for layer_type in sorted(set(text.layer_types)):
        layer = text.per_layer_config[text.layer_types.index(layer_type)]
        shape = (layer.num_key_value_heads, LENGTH, layer.head_dim)
        shared[layer_type] = (states(*shape, seed=4), states(*shape, seed=5))
    return {
        "inputs_embeds": states(1, 2 * model.config.backbone_hidden_size, seed=3),
        "position_ids": torch.full((BATCH, 1), LENGTH),
        "shared_kv_states": shared,
    }


def _codebooks(model: PreTrainedModel) -> Inputs:
    ids = tokens(LENGTH, seed=1, batch=BATCH * model.config.num_codebooks)
    return {"input_ids": ids} | cross_attention_states(model)


def _flattened_patches(model: PreTrainedModel) -> Inputs:
    """Patches led by their row and column."""
    patches = states(ENCODER_LENGTH, 2 + model.config.vision_config.patch_embed_hidden_size, seed=8)
    patches[..., 0], patches[..., 1] = 1, torch.arange(1, ENCODER_LENGTH + 1)
    return {"flattened_patches": patches, "decoder_input_ids": tokens(DECODER_LENGTH, seed=2)}


def _image_to_text(model: PreTrainedModel) -> Inputs:
    return {"pixel_values": _pixels(model), "decoder_input_ids": tokens(DECODER_LENGTH, seed=2)}


def _image_beside(model: PreTrainedModel) -> Inputs:
    return {"pixel_values": _pixels(model)}


def _query_tokens(model: PreTrainedModel, token: int, frames: int) -> Inputs:
    """Placeholders in front of the text for what a Q-Former reads off `frames` images; one image when 0."""
    pixels = _pixels(model)
    count = model.config.num_query_tokens * max(frames, 1)
    ids = torch.cat([torch.full((BATCH, count), token), tokens(LENGTH, seed=1)], dim=1)
    return {"input_ids": ids, "pixel_values": pixels.unsqueeze(1).expand(-1, frames, -1, -1, -1) if frames else pixels}


def _qformer(model: PreTrainedModel) -> Inputs:
    return _query_tokens(model, model.config.image_token_index, frames=0)


def _qformer_with_prompt(model: PreTrainedModel) -> Inputs:
    return _qformer(model) | {"qformer_input_ids": tokens(LENGTH, seed=6)}


def _qformer_on_video(model: PreTrainedModel) -> Inputs:
    # The model itself expects four frames.
    inputs = _query_tokens(model, model.config.video_token_index, frames=4)
    return inputs | {"qformer_input_ids": tokens(LENGTH, seed=6)}


def _interleaved(model: PreTrainedModel) -> Inputs:
    return {
        "pixel_values": _pixels(model).unsqueeze(1),
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    }


def _image_places(model: PreTrainedModel) -> torch.Tensor:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    mask[:, 1 : 1 + model.config.latent_query_num] = 1
    return mask


def _image_in_place(model: PreTrainedModel) -> Inputs:
    return {"pixel_values": _pixels(model), "image_embeds_position_mask": _image_places(model)}


def _image_embeddings(model: PreTrainedModel) -> Inputs:
    return {
        "image_embeds": states(model.config.latent_query_num, model.config.text_config.embed_dim, seed=8),
        "image_embeds_position_mask": _image_places(model),
    }


def _cross_states(model: PreTrainedModel) -> Inputs:
    return {"cross_attention_states": states(ENCODER_LENGTH, model.config.get_text_config().hidden_size, seed=3)}


def _encoder_outputs(model: PreTrainedModel) -> Inputs:
    return {"encoder_outputs": (states(ENCODER_LENGTH, model.config.hidden_size, seed=3),)}


def _shapes_and_sounds(model: PreTrainedModel) -> Inputs:
    return {
        "input_shape_ids": tokens(LENGTH, seed=6, high=model.config.shape_vocab_size),
        "input_pronunciation_ids": tokens(LENGTH, seed=7, high=model.config.pronunciation_vocab_size),
    }


def _sound_per_token(model: PreTrainedModel) -> Inputs:
    frames = LENGTH * model.config.downsample_factor
    return {"encoder_inputs_embeds": states(frames, model.config.audio_config.hidden_size, seed=8)}


def _canvas(model: PreTrainedModel) -> Inputs:
    # Without these ids the model draws random ones.
    return {"decoder_input_ids": tokens(DECODER_LENGTH, seed=2)}


def _global_attention(model: PreTrainedModel) -> Inputs:
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    mask[:, 0] = 1
    return {"global_attention_mask": mask}


def _boxes(model: PreTrainedModel) -> Inputs:
    corners = torch.rand(BATCH, LENGTH, 2, generator=torch.Generator().manual_seed(8)) / 2
    return {"bbox": torch.cat([corners, corners + 0.4], dim=-1)}


WHOLE: dict[str, Callable[[PreTrainedModel], Inputs]] = {
    "gemma4_assistant": _speculative,
    "gemma4_unified_assistant": _speculative,
    "musicgen_decoder": _codebooks,
    "musicgen_melody_decoder": _codebooks,
    "pix2struct": _flattened_patches,
    "pp_formulanet": _image_to_text,
    "vision-encoder-decoder": _image_to_text,
}
EXTRA: dict[str, Callable[[PreTrainedModel], Inputs]] = {
    "blip": _image_beside,
    "blip-2": _qformer,
    "diffusion_gemma": _canvas,
    "idefics": _interleaved,
    "instructblip": _qformer_with_prompt,
    "instructblipvideo": _qformer_on_video,
    "kosmos-2": _image_in_place,
    "kosmos-2.5": _image_embeddings,
    "led": _global_attention,
    "longformer": _global_attention,
    "mllama": _cross_states,
    "mllama_text_model": _cross_states,
    "roc_bert": _shapes_and_sounds,
    "udop": _boxes,
    "voxtral_realtime": _sound_per_token,
    "whisper": _encoder_outputs,
}

# Types whose usual inputs contain pixels, because they cannot be run without.
PIXELS_ANYWAY = frozenset(
    {
        "blip",
        "blip-2",
        "idefics",
        "instructblip",
        "instructblipvideo",
        "kosmos-2",
        "pix2struct",
        "pp_formulanet",
        "vision-encoder-decoder",
    }
)
