"""Gemma 4 without the norms that cancel computes what the stock model does, and the comparison would see a fault."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import flashnorm
from flashnorm.sites.cancelling import audit_cancellation
from tests import zoo
from tests.cancelling.examine import with_small_embeddings
from tests.zoo.configs import shrink
from tests.zoo.weights import randomise

transformers = pytest.importorskip("transformers", minversion="5.17")
gemma4_strict = pytest.importorskip("examples.gemma4_strict")
if "gemma4_text" not in zoo.model_types("causal"):
    pytest.skip("this Transformers has no gemma4_text", allow_module_level=True)

# Beside sliding windows, two head sizes and proportional RoPE, which all of them have.
VARIANTS: dict[str, dict[str, Any]] = {
    "shared keys and values, experts, embeddings per layer": {},
    "one matrix for keys and values": {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "tie_word_embeddings": False,
    },
    "wide MLPs in layers that share": {"enable_moe_block": False, "use_double_wide_mlp": True},
}  # fmt: skip


def stock(variant: str) -> Any:
    """A tiny model in fp64 with random gains."""
    config_class = type(zoo.tiny_config("causal", "gemma4_text"))
    config = shrink(config_class, overrides=zoo_overrides() | VARIANTS[variant], causal=True)
    model = transformers.Gemma4ForCausalLM(config).eval()
    randomise(model, 0)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    return model.double()


def zoo_overrides() -> dict[str, Any]:
    from tests.zoo import quirks

    return dict(quirks.CONFIG["gemma4_text"])


def written(model: Any, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of the model and its strict fold."""
    model.save_pretrained(folder / "source")
    flashnorm.fold_checkpoint(folder / "source", folder / "folded", strict=True)
    return folder / "source", folder / "folded"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return written(stock(next(iter(VARIANTS))), tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with embeddings of RMS 1e-4, where the epsilons count."""
    return written(with_small_embeddings(stock(next(iter(VARIANTS)))), tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_its_logits_are_those_of_the_stock_model(variant: str, tmp_path: Path) -> None:
    assert gemma4_strict.compare(*written(stock(variant), tmp_path)) <= 1e-10


def test_so_are_those_of_the_variant_with_everything(folders: tuple[Path, Path], small: tuple[Path, Path]) -> None:
    assert gemma4_strict.compare(*small) <= 1e-10
    assert gemma4_strict.main([str(folder) for folder in folders]) == 0


def test_what_it_has_not_is_what_cancels(folders: tuple[Path, Path]) -> None:
    source, folded = folders
    model = flashnorm.load(source)
    full = [c.norm for c in audit_cancellation(model).cancellations if c.verdict == "full"]
    assert len(full) == model.config.num_hidden_layers
    strict = gemma4_strict.load_strict(folded, torch.float64)
    theirs = {name for name, module in model.named_modules() if type(module).__name__ == "Gemma4RMSNorm"}
    ours = {name for name, module in strict.named_modules() if isinstance(module, gemma4_strict.Norm)}
    assert theirs - ours == set(full)
    assert ours <= theirs


class TestNegativeControls:
    """The comparison sees each way to get the scalar or the weights wrong."""

    def test_the_epsilon_without_the_scalar(self, small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gemma4_strict.algebra, "carried_epsilon", lambda x, *eps: torch.ones_like(x[..., :1]))
        assert gemma4_strict.compare(*small) > 1e-3

    def test_a_weight_without_its_gain(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        source, folded = folders
        name = "model.layers.1.self_attn.k_proj.weight"
        changed = with_tensor(folded, tmp_path, name, load_file(source / "model.safetensors")[name])
        assert gemma4_strict.main([str(source), str(changed)]) == 1


class TestRefusals:
    def refused(self, folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert gemma4_strict.main([str(folder), str(folder)]) == 2
        assert words in capsys.readouterr().err

    def test_a_source_that_is_not_folded(self, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
        self.refused(folders[0], "has no flashnorm.json", capsys)

    def test_a_fold_that_keeps_the_gains(
        self, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flashnorm.fold_checkpoint(folders[0], tmp_path / "compatible")
        self.refused(tmp_path / "compatible", "is a compatible fold", capsys)

    def test_a_tensor_that_has_no_place(
        self, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        extra = "model.layers.0.input_layernorm.weight"
        self.refused(with_tensor(folders[1], tmp_path, extra, torch.ones(64)), extra, capsys)

    def test_another_family(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        zoo.tiny_model("causal", "llama").save_pretrained(tmp_path / "llama")
        self.refused(tmp_path / "llama", "is of type llama", capsys)

    def test_a_wrong_call(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gemma4_strict.main(["one"]) == 2
        assert "usage" in capsys.readouterr().err


def with_tensor(folder: Path, at: Path, name: str, value: torch.Tensor) -> Path:
    """A copy of a folder in which one tensor is another, or is added."""
    copied = Path(shutil.copytree(folder, at / "changed"))
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | {name: value}, copied / "model.safetensors", metadata={"format": "pt"})
    return copied
