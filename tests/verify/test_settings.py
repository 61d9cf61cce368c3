"""Settings that folding does not write are the source's; a difference in them is a failed check that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flashnorm
from flashnorm.verify.settings import differing_settings
from flashnorm.verify.stored import stored_checks
from tests.verify.tiny import save, tiny_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source = save(tiny_model("llama"), tmp_path / "source", with_tokenizer=False)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "do_sample": False}))
    flashnorm.fold_checkpoint(source, tmp_path / "folded", untie=True)
    return source, tmp_path / "folded"


def _write(folder: Path, name: str, **values: Any) -> None:
    table = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(table))


def _failures(folders: tuple[Path, Path]) -> tuple[float, str]:
    weights, settings = stored_checks(*folders)
    assert weights.value == 0
    return settings.value, settings.meaning


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"untie": True}], ids=str)
def test_what_folding_writes_is_no_difference(tmp_path: Path, options: dict[str, bool]) -> None:
    source = save(tiny_model("llama"), tmp_path / "source", with_tokenizer=False)
    flashnorm.fold_checkpoint(source, tmp_path / "folded", **options)
    assert _failures((source, tmp_path / "folded"))[0] == 0


def test_what_acts_only_beyond_the_samples_is_found(folders: tuple[Path, Path]) -> None:
    _write(folders[1], "config.json", max_position_embeddings=64, rope_parameters={"rope_type": "default"})
    report = flashnorm.verify(*folders, positions=32, new_tokens=0)
    assert [(check.name, check.value) for check in report.failures] == [("settings", 2)]
    assert report.verdict == (
        "settings differ that folding does not change: config.json max_position_embeddings, config.json "
        "rope_parameters.rope_theta"
    )


def test_generation_settings(folders: tuple[Path, Path]) -> None:
    _write(folders[1], "generation_config.json", eos_token_id=[1], top_k=5)
    assert _failures(folders) == (
        2,
        "settings differ that folding does not change: generation_config.json eos_token_id, generation_config.json "
        "top_k",
    )
    (folders[1] / "generation_config.json").unlink()
    assert _failures(folders)[0] == 2


def test_a_flag_that_folding_wrote_and_someone_took_back(folders: tuple[Path, Path]) -> None:
    _write(folders[1], "config.json", tie_word_embeddings=True)
    assert _failures(folders) == (1, "settings differ that folding does not change: config.json tie_word_embeddings")


def test_who_saved_a_file_is_no_setting(folders: tuple[Path, Path]) -> None:
    _write(folders[1], "config.json", transformers_version="9.9", _name_or_path="elsewhere")
    assert _failures(folders)[0] == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1.0}, ["a"]),
        ({"a": 1}, {"a": True}, ["a"]),
        ({"a": None}, {}, ["a"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["a.c"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a"]),
    ],
)
def test_differing_keys(ours: dict[str, Any], theirs: dict[str, Any], names: list[str]) -> None:
    assert differing_settings(ours, theirs) == names
