import errno
import os
from pathlib import Path

import pytest
from transformers import AutoConfig

from flashnorm.checkpoint.source import open_source
from flashnorm.checkpoint.tree import file_size, list_files, read_json, read_pieces
from flashnorm.errors import CheckpointError, ConfigError, Refusal
from tests.checkpoint.tiny import write_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "source")


def test_every_file_but_no_bookkeeping(folder):
    for name in (".git/config", ".cache/huggingface/x.metadata", "code/.cache/kept", ".gitattributes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    files = list_files(folder)
    assert {"code/.cache/kept", ".gitattributes", "code/modeling_custom.py", "empty"} <= set(files)
    assert not any(name.startswith((".git/", ".cache/")) for name in files)


def test_link_to_nothing(folder):
    (folder / "tokenizer.model").symlink_to("gone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is a link to a file that does not exist"):
        open_source(folder)


def test_link_to_a_folder_is_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "note").touch()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert "linked/note" in list_files(folder)


def test_link_to_its_own_folder(folder):
    (folder / "code" / "loop").symlink_to("..")
    with pytest.raises(CheckpointError, match="loop is a link to a folder that it lies in"):
        list_files(folder)


def test_link_to_itself(folder):
    (folder / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"loop cannot be read: .*; it is a link that leads back to itself"):
        list_files(folder)


def test_pipe(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe is neither a file nor a folder"):
        list_files(folder)


def test_unreadable_file(folder, monkeypatch):
    unchanged = Path.open

    def deny(path, *arguments, **options):  # the superuser may read everything, so permissions cannot be tested as one
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied")
        return unchanged(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: Permission denied; ask for"):
        open_source(folder)


def test_unreadable_subfolder(folder, monkeypatch):
    unchanged = os.listdir

    def deny(path):
        if Path(path).name == "code":
            raise PermissionError(13, "Permission denied")
        return unchanged(path)

    monkeypatch.setattr(os, "listdir", deny)
    with pytest.raises(CheckpointError, match="code cannot be read: Permission denied; ask for read access"):
        open_source(folder)


@pytest.mark.parametrize("read", [list_files, file_size, read_json, lambda path: list(read_pieces(path))])
def test_trouble_with_the_disk_is_the_sources(folder, monkeypatch, read):
    """No way of reading lets an OSError out: whoever writes at the same time would take it for the output's."""

    def fail(*arguments, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("stat", "listdir", "open"):
        monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "stat", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error; check the disk it is on"):
        read(folder)


ENCODINGS = ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("name", "error"), [("config.json", ConfigError), ("model.safetensors.index.json", Refusal)])
def test_json_is_utf_8_without_a_mark(folder, encoding, name, error):
    """What loaders cannot read is not read here: they would reject the folded folder."""
    text = (folder / name).read_text().replace("{", '{"note": "é", ', 1)
    (folder / name).write_text(text, encoding="utf-8")
    open_source(folder)
    (folder / name).write_text(text, encoding=encoding)
    with pytest.raises(error, match="is not valid JSON"):
        open_source(folder)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_transformers_rejects_the_same_configs(folder, encoding):
    path = folder / "config.json"
    text = path.read_text().replace("{", '{"note": "é", ', 1)
    path.write_text(text, encoding="utf-8")
    assert AutoConfig.from_pretrained(folder).note == "é"
    path.write_text(text, encoding=encoding)
    with pytest.raises(OSError, match="not a valid JSON file"):
        AutoConfig.from_pretrained(folder)
