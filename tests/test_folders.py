"""A path that is no folder is told the same by every command, before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashnorm.cli.main import main
from flashnorm.errors import CheckpointError
from flashnorm.folders import require_folder

COMMANDS = {
    "audit": ("audit", "{}"),
    "fold": ("fold", "{}", "out"),
    "unfold": ("unfold", "{}", "out"),
    "verify": ("verify", "{}", "there"),
    "verify, second": ("verify", "there", "{}"),
    "verify --hashes": ("verify", "--hashes", "{}"),
    "lora, base": ("lora", "there", "{}", "out"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_says_the_same(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for path, sentence in (
        ("nothing", "nothing does not exist; give a checkpoint folder"),
        ("org/name", "org/name does not exist; if it is a model of the Hugging Face Hub, download it with "
         "`hf download org/name --local-dir name`, then give name"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            main([part.format(path) for part in command])
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"flashnorm: {sentence}\n"


def test_a_typo_in_a_path_is_not_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for path in ("models/nothing", "/a/b", "a/b/c"):
        with pytest.raises(CheckpointError) as refusal:
            require_folder(path)
        assert "Hub" not in str(refusal.value)


def test_files(tmp_path: Path) -> None:
    for name, sentence in (("model.gguf", "import it first"), ("model.safetensors", "give the x that it lies in")):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=sentence):
            require_folder(tmp_path / name, "x")
    require_folder(tmp_path)


def test_torch_is_not_loaded_for_it() -> None:
    code = (
        "import sys\nfrom flashnorm.cli.main import main\n"
        "try:\n    main(['audit', 'nothing'])\nexcept SystemExit as stop:\n    assert stop.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
