import pytest

from flashnorm.checkpoint.foreign import other_weights
from flashnorm.checkpoint.source import open_source
from flashnorm.errors import CheckpointError
from tests.checkpoint.tiny import write_checkpoint


def folder_with(tmp_path, *names):
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("config.json", *names):
        (folder / name).write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("pytorch_model.bin",), r"\.bin files only.*from_pretrained.*save_pretrained"),
        (("pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"), r"\.bin files only"),
        (("model-Q4_K_M.gguf",), "holds a GGUF file, 'model-Q4_K_M.gguf'; .*`flashnorm import-gguf`"),
        (("consolidated.00.pth",), "has 'consolidated.00.pth' but no safetensors weights"),
        (("tf_model.h5",), "has 'tf_model.h5' but no safetensors weights"),
        (("adapter_config.json", "adapter_model.safetensors"), "holds a LoRA adapter.*`flashnorm lora`"),
        (("adapter_model.bin",), "holds a LoRA adapter.*`flashnorm lora`"),
        (("README.md",), r"has no model\.safetensors and no"),
    ],
)
def test_folders_of_other_kinds(tmp_path, names, words):
    with pytest.raises(CheckpointError, match=words):
        open_source(folder_with(tmp_path, *names))


def test_a_gguf_file(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"is a GGUF file; .*`flashnorm import-gguf`"):
        open_source(tmp_path / "model.gguf")


def test_another_file(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    with pytest.raises(CheckpointError, match="is a file; give the checkpoint folder"):
        open_source(folder / "config.json")


def test_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")


def test_other_formats_beside_safetensors_are_kept_and_known(tmp_path):
    folder = write_checkpoint(tmp_path / "source")
    for name in ("pytorch_model.bin", "training_args.bin", "rng_state.pth"):
        (folder / name).touch()
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").touch()
    assert other_weights(open_source(folder).files) == ["original/consolidated.00.pth", "pytorch_model.bin"]
