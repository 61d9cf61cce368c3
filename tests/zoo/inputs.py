"""Inputs that run a tiny model's whole language part, and the logits they give."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.zoo.images import image_inputs
from tests.zoo.special_inputs import EXTRA, PIXELS_ANYWAY, WHOLE, Inputs, cross_attention_states
from tests.zoo.tensors import DECODER_LENGTH, LENGTH, tokens


def forward_inputs(model: PreTrainedModel, family: str, *, with_images: bool = False) -> Inputs:
    """Deterministic keyword arguments for `model`: (2, 12) token ids, and (2, 7) decoder ids for `seq2seq`.

    A decoder with cross attention also gets (2, 5, width) encoder states, so that no layer is passed over; a type
    that cannot run on text alone gets the least beside it. `with_images` gives every row of an `image_text` type one
    image, with placeholders for it in the text, and raises `CannotBuild` where no generic form of that fits.
    """
    model_type = model.config.model_type
    if with_images and model_type not in PIXELS_ANYWAY:
        return image_inputs(model)
    if model_type in WHOLE:
        return WHOLE[model_type](model)
    inputs: Inputs = {"input_ids": tokens(LENGTH, seed=1)}
    if family == "seq2seq" or model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(DECODER_LENGTH, seed=2)
    else:
        inputs |= cross_attention_states(model)
    if model_type in EXTRA:
        inputs |= EXTRA[model_type](model)
    return inputs


def logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """The logits of one forward pass without a cache, (batch, tokens, vocabulary) for a language model."""
    with torch.no_grad():
        output = model(**inputs, use_cache=False)
    return output[0] if isinstance(output, tuple) else output.logits
