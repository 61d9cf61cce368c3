"""The tokenizer, the chat template and the special tokens that a GGUF describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flashnorm.checkpoint.gguf_file import metadata
from flashnorm.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

# Name in Transformers -> name in the metadata.
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def read_tokenizer(file: Path, reader: GGUFReader, location: dict[str, Any]) -> PreTrainedTokenizerFast | None:
    """The tokenizer, rebuilt by Transformers; None when the GGUF has none. Raises `CheckpointError` when it cannot be.

    It keeps the generic class, which loads as it was saved: an architecture's own would rebuild parts of itself.
    """
    kind = metadata(reader, "tokenizer.ggml.model")
    if kind in (None, "none"):
        return None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**location)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} has a tokenizer of kind {kind!r}, which Transformers cannot rebuild; "
            "start from the model's safetensors checkpoint instead"
        ) from error
    # Transformers 5.17 confuses the beginning and the end of the sequence; the metadata decides.
    for name, token in _special_tokens(reader).items():
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    return tokenizer


def set_special_tokens(model: PreTrainedModel, reader: GGUFReader) -> None:
    """Tell `generate` where to stop: architectures differ in whether Transformers takes these ids over itself."""
    generation = model.generation_config
    for name, token in _special_tokens(reader).items():
        if name != "unk" and not isinstance(getattr(generation, f"{name}_token_id"), list):
            setattr(generation, f"{name}_token_id", token)
            setattr(model.config, f"{name}_token_id", token)
    end_of_turn = metadata(reader, "tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and isinstance(generation.eos_token_id, int) and end_of_turn != generation.eos_token_id:
        generation.eos_token_id = [generation.eos_token_id, end_of_turn]


def _special_tokens(reader: GGUFReader) -> dict[str, int]:
    ids = {name: metadata(reader, f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    return {name: token for name, token in ids.items() if token is not None}
