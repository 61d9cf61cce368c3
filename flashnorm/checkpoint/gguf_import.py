"""A GGUF dequantised to a Transformers checkpoint, every tensor accounted for and the gain convention kept.

Transformers reads the GGUF: it undoes llama.cpp's permutation of q and k and its `1 + w` storage of one-plus gains. It
also skips in silence a tensor that it has no name for and RoPE settings that it does not translate, either of which
would give another model; here each is translated or refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from flashnorm.checkpoint.gguf_file import metadata, open_gguf
from flashnorm.checkpoint.gguf_rope import FREQUENCY_FACTORS
from flashnorm.checkpoint.gguf_settings import complete_config, ignored_settings
from flashnorm.checkpoint.gguf_tokenizer import read_tokenizer, set_special_tokens
from flashnorm.checkpoint.saving import distinct_tensors, write_model
from flashnorm.checkpoint.staging import check_output
from flashnorm.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

AUTO_CLASSES = (
    (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
)


@dataclass(frozen=True)
class ImportReport:
    """What an import wrote."""

    source: str
    out: str
    architecture: str  # the GGUF's own name for it
    model_type: str  # the name in Transformers
    dtype: str
    parameters: int  # distinct values: a tied head counts once
    tokenizer: bool
    chat_template: bool
    ignored: tuple[str, ...]  # metadata keys of the architecture whose value occurs nowhere in the config


def import_gguf(file: str | Path, out: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> ImportReport:
    """Dequantise the GGUF `file` to the Transformers checkpoint folder `out`, with tokenizer and chat template.

    Each value is dequantised in fp32 and rounded once to `dtype` (fp32 keeps it exactly). Needs the extra `gguf` and
    memory for the whole model in `dtype`. Raises `CheckpointError` for a file that is not a whole GGUF, that stores
    something the model would lack, or whose values do not fit `dtype`; `ConfigError` for an architecture that
    Transformers cannot read from a GGUF; `OutputError` when `out` exists or cannot be written. Nothing is left behind.
    """
    file, out = Path(file), Path(out)
    check_output(file, out)
    reader = open_gguf(file)
    with _alone(file) as location:
        config = _read_config(file, reader, location)
        model = _load(file, reader, config, dtype, location)
        tokenizer = read_tokenizer(file, reader, location)
    set_special_tokens(model, reader)
    _write(model, tokenizer, out)
    return ImportReport(
        source=str(file),
        out=str(out),
        architecture=metadata(reader, "general.architecture"),
        model_type=config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        parameters=_count(model),
        tokenizer=tokenizer is not None,
        chat_template=getattr(tokenizer, "chat_template", None) is not None,
        ignored=ignored_settings(reader, model.config),
    )


@contextmanager
def _alone(file: Path) -> Iterator[dict[str, Any]]:
    """Arguments that make `from_pretrained` read `file` and none of the configs that may lie beside it."""
    with TemporaryDirectory(prefix="flashnorm-gguf-") as folder:
        (Path(folder) / "model.gguf").symlink_to(file.resolve())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": "model.gguf"}


def _write(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    def beside(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    write_model(model, out, beside)


def _read_config(file: Path, reader: GGUFReader, location: dict[str, Any]) -> PreTrainedConfig:
    architecture = metadata(reader, "general.architecture")
    try:
        config = AutoConfig.from_pretrained(**location)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{file} holds a model of architecture {architecture!r}, which Transformers {transformers.__version__} "
            "cannot read from a GGUF; start from the model's safetensors checkpoint instead"
        ) from error
    complete_config(file, reader, config)
    return config


def _load(
    file: Path, reader: GGUFReader, config: PreTrainedConfig, dtype: torch.dtype, location: dict[str, Any]
) -> PreTrainedModel:
    """The dequantised model, rebuilt so that Transformers takes it for an ordinary one and agrees to save it."""
    options: dict[str, Any] = {"config": config, "dtype": dtype, "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # where packed weights are the default (Transformers 5.2x)
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded, info = _model_class(file, config).from_pretrained(**location, **options)
    if info["missing_keys"] or info["mismatched_keys"]:
        name = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))[0]
        raise CheckpointError(
            f"{file} has no tensor for {name!r} of a {config.model_type} model; start from its safetensors checkpoint"
        )
    config = loaded.config
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    _refuse_unread(file, reader, model)
    _refuse_non_finite(file, model)
    return model


def _model_class(file: Path, config: PreTrainedConfig) -> Any:
    for mapping, auto_class in AUTO_CLASSES:
        if type(config) in mapping:
            return auto_class
    raise ConfigError(
        f"{file} holds a {config.model_type} model, which is no language model with a head; "
        "start from its safetensors checkpoint instead"
    )


def _refuse_unread(file: Path, reader: GGUFReader, model: PreTrainedModel) -> None:
    """Every stored value must have arrived: Transformers skips tensors that it has no name for without a word."""
    layers = model.config.get_text_config().num_hidden_layers
    tied = model.config.get_text_config().tie_word_embeddings
    expected = [
        tensor
        for tensor in reader.tensors
        if tensor.name != FREQUENCY_FACTORS  # now in the config
        and not (tied and tensor.name == "output.weight")  # a second copy of the embedding
        and not tensor.name.startswith(f"blk.{layers}.")  # a multi-token-prediction block, which the model lacks
    ]
    stored, arrived = sum(int(tensor.n_elements) for tensor in expected), _count(model)
    if stored != arrived:
        raise CheckpointError(
            f"{file} stores {stored:,} values but the {model.config.model_type} model built from it has {arrived:,}, "
            "so that some would be lost; start from the model's safetensors checkpoint instead"
        )


def _count(model: PreTrainedModel) -> int:
    return sum(value.numel() for value in distinct_tensors(model))


def _refuse_non_finite(file: Path, model: PreTrainedModel) -> None:
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{file} gives NaN or infinite values in {name!r} as {str(value.dtype).removeprefix('torch.')}; "
                "import with --dtype float32, or get an intact file"
            )
