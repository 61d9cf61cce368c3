"""What a folder holds beside the model that is folded is said, by the audit and by the fold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.remarks import left_alone, remarks
from tests.checkpoint.test_fold import SMALL, saved

OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path, LlamaForCausalLM(LlamaConfig(**SMALL)))


def _with_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | OWN_CODE
    (folder / "config.json").write_text(json.dumps(config))


def test_a_plain_folder_needs_no_word(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remarks(source) == ()
    fold_checkpoint(source, tmp_path / "out", quiet=False)
    assert "note:" not in capsys.readouterr().err


def test_code_of_its_own_for_a_type_that_transformers_knows(source: Path) -> None:
    _with_code(source)
    [note] = remarks(source)
    assert note.startswith("config.json names model code of the folder's own (auto_map)")
    assert "Transformers has for 'llama'" in note
    assert left_alone((), OWN_CODE, trust_remote_code=True) == ()


def test_a_fold_says_the_same_on_stderr(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _with_code(source)
    (source / "modules.json").write_text("[]")
    (source / "pytorch_model.bin").write_bytes(b"the same model")
    notes = remarks(source)
    assert [note.split()[0] for note in notes] == ["pytorch_model.bin", "config.json", "modules.json"]
    fold_checkpoint(source, tmp_path / "out", quiet=False)
    printed = capsys.readouterr().err
    assert all(f"note: {note}\n" in printed for note in notes)
    assert (tmp_path / "out" / "pytorch_model.bin").read_bytes() == b"the same model"
    fold_checkpoint(source, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
