"""The source must stay as it was opened until everything has been read: gains are read early and weights late."""

from __future__ import annotations

import os
import shutil

import pytest

from flashnorm.checkpoint import fold
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.errors import CheckpointError
from tests.checkpoint.lora_cases import CASES, write_base


@pytest.fixture
def source(tmp_path):
    return write_base(next(iter(CASES.values())), tmp_path / "source")


def _then(monkeypatch, change):
    """Do something between the planning and the streaming of the next fold."""
    apply = fold.apply_plan

    def changed(*arguments, **options):
        change()
        return apply(*arguments, **options)

    monkeypatch.setattr(fold, "apply_plan", changed)


@pytest.mark.parametrize("how", ["replaced", "touched", "config"])
def test_a_change_after_planning_is_refused_and_leaves_nothing(source, tmp_path, monkeypatch, how):
    name = "config.json" if how == "config" else next(p.name for p in source.glob("*.safetensors"))
    path = source / name

    def change():
        if how == "touched":
            os.utime(path)
            return
        shutil.copy(path, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    _then(monkeypatch, change)
    with pytest.raises(CheckpointError, match=f"{name} changed while it was read"):
        fold_checkpoint(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_without_a_change_it_goes_through(source, tmp_path, monkeypatch):
    _then(monkeypatch, lambda: None)
    fold_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
