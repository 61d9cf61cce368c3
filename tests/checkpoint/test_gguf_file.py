"""Whatever is not one whole GGUF is refused when it is opened, in one sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from flashnorm.checkpoint import gguf_file
from flashnorm.checkpoint.gguf_file import metadata, open_gguf
from flashnorm.errors import CheckpointError
from tests.checkpoint.gguf_writing import tiny_llama, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny_llama())


def _refusal(file: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_gguf(file)
    return str(caught.value)


def test_a_whole_file_opens(whole: Path) -> None:
    reader = open_gguf(whole)
    assert metadata(reader, "general.architecture") == "llama"
    assert metadata(reader, "no.such.key", 7) == 7
    assert len(reader.tensors) == 2 * 9 + 3


def test_every_truncation_is_refused(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    rng = np.random.default_rng(0)
    lengths = [4, 7, 8, 24, 100, len(content) - 1, *rng.integers(4, len(content), 20)]
    for length in lengths:
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        assert "truncated or corrupt" in _refusal(tmp_path / "cut.gguf"), length


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert "is not a GGUF" in _refusal(tmp_path / "model.safetensors")
    (tmp_path / "empty.gguf").touch()
    assert "is not a GGUF" in _refusal(tmp_path / "empty.gguf")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in _refusal(tmp_path / "nothing.gguf")
    assert "is not a file" in _refusal(tmp_path)


def test_another_byte_order_is_refused(whole: Path, tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in _refusal(tmp_path / "big.gguf")


def test_a_part_names_the_parts_that_are_missing(tmp_path: Path) -> None:
    part = tmp_path / "model-00002-of-00003.gguf"
    write_gguf(part, tiny_llama(), metadata={"split.count": 3})
    (tmp_path / "model-00003-of-00003.gguf").touch()
    message = _refusal(part)
    assert "one of 3 parts" in message
    assert "model-00001-of-00003.gguf is missing" in message
    assert "--merge model-00001-of-00003.gguf model.gguf" in message


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    assert "join its parts" in _refusal(write_gguf(tmp_path / "part.gguf", tiny_llama(), metadata={"split.count": 2}))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(package: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None if name == package else found(name))
    assert f"needs the package {package}" in _refusal(whole)
    assert "pip install 'flashnorm[gguf]'" in _refusal(whole)
