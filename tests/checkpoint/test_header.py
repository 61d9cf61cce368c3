import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from flashnorm.checkpoint.header import Entry, encode_header, read_header
from flashnorm.errors import CheckpointError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"b": torch.arange(6, dtype=torch.float32).view(2, 3), "a": torch.ones(5, dtype=torch.bfloat16)}
    save_file({**tensors, "none": torch.empty(0, 4)}, path, metadata={"format": "pt"})
    return path


def rewrite(path, change):
    """Change the header's table and keep the rest of the file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_reads_what_safetensors_wrote(path):
    shard = read_header(path)
    assert shard.metadata == {"format": "pt"}
    assert shard.size == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert {info.name for info in shard.tensors} == set(file.keys())
        for info in shard.tensors:
            tensor = file.get_tensor(info.name)
            assert (info.dtype, info.shape, info.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            assert path.read_bytes()[info.start : info.end] == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_a_written_header_is_read_by_safetensors(tmp_path):
    entries = [Entry("é", "F32", (2, 3)), Entry("none", "F32", (0,)), Entry("half", "F16", (3,))]
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(entries, {"note": "ü"}) + bytes(30))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"note": "ü"}
        assert file.get_tensor("é").shape == (2, 3)
        assert file.get_tensor("half").dtype == torch.float16
    assert [info.name for info in read_header(path).tensors] == ["é", "none", "half"]
    assert read_header(path).data_start % 8 == 0


def test_a_header_with_a_misaligned_tensor_is_refused():
    with pytest.raises(CheckpointError, match="'wide' would not be aligned"):
        encode_header([Entry("odd", "BF16", (3,)), Entry("wide", "F32", (1,))], {})


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1, -30])
def test_truncated_anywhere(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        read_header(path)


def test_bytes_after_the_last_tensor(path):
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="4 bytes follow its last tensor"):
        read_header(path)


def test_a_pointer_of_git_lfs(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 42\n")
    with pytest.raises(CheckpointError, match="run `git lfs pull`"):
        read_header(path)


@pytest.mark.parametrize(
    "data",
    [
        b"not a checkpoint at all, just some text",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x04\0\0\0\0\0\0\0\xff{}\xfe",
        b"\xff" * 64,
    ],
)
def test_no_header(path, data):
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        read_header(path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
def test_a_header_in_another_encoding(path, encoding):
    """The format's own reader takes UTF-8 without a mark alone."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode().encode(encoding)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(CheckpointError, match="its header is not valid JSON in UTF-8"):
        read_header(path)


def set_entry(**values):
    return lambda table: table["b"].update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_entry(data_offsets=[0, 20]), "not as many bytes as its shape needs"),
        (set_entry(shape=[2, 4]), "not as many bytes as its shape needs"),
        (set_entry(shape=[-2, -3]), "lacks a dtype, a shape or byte offsets"),
        (set_entry(data_offsets=[0.0, 24]), "lacks a dtype, a shape or byte offsets"),
        (set_entry(data_offsets=None), "lacks a dtype, a shape or byte offsets"),
        (set_entry(data_offsets=[4, 28]), "overlap or leave a gap"),
        (set_entry(dtype="Q4_K"), "a number format that this version does not know"),
        (set_entry(dtype=[7]), "a number format that this version does not know"),
        (lambda table: table.pop("b"), "overlap or leave a gap"),
        (lambda table: table.update(b=3), "lacks a dtype, a shape or byte offsets"),
        (lambda table: table.update(__metadata__={"format": 1}), "not a table of strings"),
        (
            lambda table: table.update(c={"dtype": "F32", "shape": [9], "data_offsets": [34, 70]}),
            "is truncated: it has",
        ),
    ],
)
def test_inconsistent_header(path, change, words):
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_a_name_that_stands_twice(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"none"', b'"a"   ', 1))
    with pytest.raises(CheckpointError, match="holds 'a' twice"):
        read_header(path)
