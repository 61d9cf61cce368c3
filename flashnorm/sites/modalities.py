"""Images, page layout and sound, for the models and the parts of models that text alone does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_PATCHES = 5


def beside_text(parameters: Iterable[str], config: Any, text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs with more than `text`, for a forward call that takes `parameters`; the least of them first.

    `text`: inputs with `input_ids` (rows, tokens) int64. First comes what a model can be asked for beside an image,
    then one image for each row, (rows, channels, height, width), then a list of one image, or a video of one frame,
    (rows, 1, channels, height, width). An image gets its placeholders in the text. A parameter whose value cannot be
    told from the config is left out.
    """
    names = set(parameters)
    extended = _extended(names, config, text, text["input_ids"])
    if extended.keys() != text.keys() and "pixel_values" not in text:
        yield extended
    if "pixel_values" in names and (pixels := image(config)) is not None:
        with_image = _extended(names, config, text, _with_placeholders(config, text["input_ids"]))
        yield with_image | {"pixel_values": pixels}
        yield with_image | {"pixel_values": pixels.unsqueeze(1)}


def _extended(names: set[str], config: Any, text: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """`text` with `ids` in it and all that can be made; without `ids` where only a decoder reads text."""
    kept = text | {"input_ids": ids}
    if "decoder_input_ids" in names and "input_ids" not in names:
        del kept["input_ids"]
    made = {name: make(config, ids) for name, make in _MAKERS.items() if name in names - kept.keys()}
    return kept | {name: value for name, value in made.items() if value is not None}


def _with_placeholders(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """`ids` behind one placeholder for each vector that the config says is made of an image, (rows, more tokens)."""
    named = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    token = next((token for token in named if token is not None), int(ids[0, 0]))
    return torch.cat([torch.full((len(ids), _vectors_of_image(config)), token), ids], dim=1)


def _vectors_of_image(config: Any) -> int:
    return getattr(config, "num_query_tokens", None) or getattr(config, "latent_query_num", None) or 0


def image(config: Any) -> torch.Tensor | None:
    """One image for each row, (2, channels, height, width), of the size that the config or a part of it names."""
    part = _part_with(config, "image_size")
    if part is None or not isinstance(part.image_size, (int, list, tuple)):
        return None
    size = (part.image_size,) * 2 if isinstance(part.image_size, int) else tuple(part.image_size)
    return _normal(2, channels(part), *size)


def channels(config: Any) -> int:
    """Colours of a pixel."""
    return getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3


def sound(config: Any, tokens: int) -> torch.Tensor | None:
    """Frames of a spectrogram, (2, bins, frames): as many as `tokens` tokens of text or as the encoder's positions."""
    part = _part_with(config, "num_mel_bins")
    if part is None:
        return None
    per_token = getattr(config, "audio_length_per_tok", None)
    frames = tokens * per_token if per_token else 2 * getattr(part, "max_source_positions", 50)
    return _normal(2, part.num_mel_bins, frames)


def _part_with(config: Any, field: str) -> Any | None:
    """The config, or else the first of its parts, that has a value for `field`."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return next((part for part in (config, *parts) if getattr(part, field, None) is not None), None)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def _patches(config: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Patches of an image in a row, each behind its row and column, which count from one."""
    part = _part_with(config, "patch_embed_hidden_size")
    if part is None:
        return None
    place = torch.stack([torch.ones(_PATCHES), torch.arange(1.0, _PATCHES + 1)], dim=-1).expand(len(ids), -1, -1)
    return torch.cat([place, _normal(len(ids), _PATCHES, part.patch_embed_hidden_size)], dim=-1)


def _boxes(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """Where each token stands on its page: left, top, right and bottom as parts of the page's size."""
    corners = torch.rand(*ids.shape, 2, generator=torch.Generator().manual_seed(4)) / 2
    return torch.cat([corners, corners + 0.25], dim=-1)


def _query_ids(config: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Text of a vocabulary of its own for the module that queries the image."""
    part = getattr(config, "qformer_config", None)
    return None if part is None else ids % part.vocab_size


def _image_positions(config: Any, ids: torch.Tensor) -> torch.Tensor:
    """True where `_with_placeholders` has put the image's vectors."""
    return (torch.arange(ids.shape[1]) < _vectors_of_image(config)).expand(ids.shape)


# Parameter of a forward call -> its value by the config and the token ids (rows, tokens); None where it is not known.
_MAKERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor | None]] = {
    "bbox": _boxes,
    "decoder_input_ids": lambda config, ids: ids.flip(1),
    "flattened_patches": _patches,
    "image_attention_mask": lambda config, ids: torch.ones(*ids.shape, 1, dtype=torch.long),
    "image_embeds_position_mask": _image_positions,
    "input_features": lambda config, ids: sound(config, ids.shape[1]),
    "qformer_input_ids": _query_ids,
}
