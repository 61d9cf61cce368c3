"""The real trained model and the text that tests share; the model is imported once and kept between runs."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
import transformers.dynamic_module_utils as remote_code
from filelock import FileLock

import flashnorm
from examples.assets import AssetError, smollm2_gguf
from examples.assets import sotu_text as read_sotu
from flashnorm.checkpoint import gguf_file, gguf_import, gguf_rope, gguf_settings, gguf_tokenizer

CACHE = Path(__file__).parent.parent / ".cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Transformers checkpoint in fp32: exactly the GGUF's dequantised values. Read only."""
    return _imported(torch.float32)


@pytest.fixture(scope="session")
def smollm2_bf16() -> Path:
    """SmolLM2-135M-Instruct as a Transformers checkpoint in bf16. Read only."""
    return _imported(torch.bfloat16)


@pytest.fixture(scope="session")
def sotu_text() -> str:
    """Some 500 kB of public-domain English."""
    try:
        return read_sotu()
    except AssetError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For checkpoints with code of their own, which Transformers copies to a place of its own before it runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_code, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


def _imported(dtype: torch.dtype) -> Path:
    folder = CACHE / f"smollm2-{_key()}" / str(dtype).removeprefix("torch.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # test processes run side by side
        if not folder.exists():
            try:
                flashnorm.import_gguf(smollm2_gguf(), folder, dtype=dtype)
            except AssetError as error:
                pytest.skip(str(error))
    return folder


def _key() -> str:
    """Changes with whatever decides what an import writes."""
    modules = (gguf_file, gguf_import, gguf_rope, gguf_settings, gguf_tokenizer)
    sources = [inspect.getsource(module) for module in modules]
    return hashlib.sha256("".join([transformers.__version__, *sources]).encode()).hexdigest()[:12]
