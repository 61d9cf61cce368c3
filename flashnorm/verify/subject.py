"""What is verified: a checkpoint folder or a live module, as something that can be loaded, with its tokenizer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from flashnorm.checkpoint.load import load
from flashnorm.errors import CheckpointError, ConfigError, FlashnormError
from flashnorm.sites.build import read_config
from flashnorm.verify.forward import TransformersModel

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True)
class Subject:
    """One of the two models. `load(dtype)` gives a private copy in eval mode; without a dtype, the stored one."""

    name: str
    config: Any
    tokenizer: Any  # None where there is none
    load: Callable[[torch.dtype | None], TransformersModel]
    folder: Path | None = None  # None: a live module

    @property
    def vocabulary(self) -> int | None:
        return getattr(self.config.get_text_config(), "vocab_size", None)

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; the ids themselves where there is no tokenizer."""
        return self.tokenizer.decode(ids) if self.tokenizer else " ".join(map(str, ids))


def open_subject(source: str | os.PathLike[str] | nn.Module, trust_remote_code: bool = False) -> Subject:
    """A subject from a checkpoint folder or a module. Raises `ConfigError` or `CheckpointError` for what is neither."""
    if isinstance(source, nn.Module):
        return _module_subject(source)
    folder = Path(source)
    config = read_config(folder, trust_remote_code)
    if getattr(config, "quantization_config", None):
        raise CheckpointError(
            f"{folder} is quantised; verify compares plain weights, so give the unquantised checkpoints"
        )

    def load_folder(dtype: torch.dtype | None) -> TransformersModel:
        with refusing(f"{folder} cannot be loaded by Transformers"):
            return load(folder, trust_remote_code=trust_remote_code, dtype=dtype or "auto")

    return Subject(str(folder), config, tokenizer_of(folder, trust_remote_code), load_folder, folder)


def _module_subject(module: nn.Module) -> Subject:
    name = type(module).__name__
    if not hasattr(module, "config"):
        raise ConfigError(f"{name} has no config; give a Transformers model or a checkpoint folder")

    def load_copy(dtype: torch.dtype | None) -> TransformersModel:
        # The tensors' copies, ready for `deepcopy` to find: on the CPU, where the token ids are, and each made once. As
        # with `from_pretrained`, buffers keep their precision.
        copies: dict[int, Any] = {id(b): b.detach().to("cpu", copy=True) for b in module.buffers()}
        for p in module.parameters():
            values = p.detach().to("cpu", dtype if p.is_floating_point() else None, copy=True)
            copies[id(p)] = nn.Parameter(values, p.requires_grad)
        return copy.deepcopy(module, copies).eval()

    return Subject(name, module.config, None, load_copy)


def tokenizer_of(folder: Path, trust_remote_code: bool) -> Any:
    """The folder's tokenizer; None where it has no tokenizer files (Transformers would then make an empty one)."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with refusing(f"the tokenizer of {folder} cannot be loaded"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def check_comparable(reference: Subject, candidate: Subject) -> None:
    """Raise `ConfigError` where the two cannot be the same model: other architecture, vocabulary or tokenizer."""
    for what, of in _IDENTITY.items():
        ours, theirs = of(reference), of(candidate)
        if ours is not None and theirs is not None and ours != theirs:
            shown = "" if isinstance(ours, dict) else f" ({ours} and {theirs})"
            raise ConfigError(
                f"{reference.name} and {candidate.name} differ in their {what}{shown}; give a checkpoint and its "
                "folded form"
            )


_IDENTITY: dict[str, Callable[[Subject], Any]] = {
    "model type": lambda subject: subject.config.model_type,
    "architecture": lambda subject: (getattr(subject.config, "architectures", None) or [None])[0],
    "vocabulary size": lambda subject: subject.vocabulary,
    "tokenizer": lambda subject: subject.tokenizer.get_vocab() if subject.tokenizer else None,
}


@contextmanager
def refusing(sentence: str) -> Iterator[None]:
    """Third-party code may raise anything; here all of it means that this checkpoint cannot be verified."""
    try:
        yield
    except FlashnormError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{sentence}: {first_line}") from error
