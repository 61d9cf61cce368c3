"""A Transformers model written to a new folder that appears whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from flashnorm.checkpoint.staging import LAST, new_folder, write_file

# How Rust's std::io::Error ends its text.
_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_model(
    model: PreTrainedModel, out: Path, beside: Callable[[Path], None], config: bytes | None = None, extra_bytes: int = 0
) -> None:
    """Save a model to the new folder `out`, with what `beside` adds to it, which takes `extra_bytes`.

    `config`: the text of `config.json`, where it is not the one that the model would write. Raises `OutputError`.
    """
    size = sum(value.nbytes for value in distinct_tensors(model)) + extra_bytes
    with new_folder(out, size) as folder, os_errors():
        # Transformers writes the config first; in a folder of its own that makes no loadable folder of half a model.
        inner = folder / "saved"
        model.save_pretrained(inner)
        own = (inner / LAST).read_bytes()
        (inner / LAST).unlink()
        for file in inner.iterdir():
            file.rename(folder / file.name)
        inner.rmdir()
        beside(folder)
        write_file(folder, LAST, own if config is None else config)


def distinct_tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    """The model's tensors, each tied one once."""
    return list({value.data_ptr(): value for value in model.state_dict().values()}.values())


@contextmanager
def os_errors() -> Iterator[None]:
    """What safetensors and tokenizers, written in Rust, raise for a failed write, as the `OSError` that it is."""
    try:
        yield
    except Exception as error:
        number = _RUST_OS_ERROR.search(str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
