"""`flashnorm lora`: base and adapter together compute the same before and after, as real PEFT computes them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashnorm.checkpoint import lora
from flashnorm.checkpoint.adapter import CONFIG, NOTE, WEIGHTS
from flashnorm.checkpoint.fold import fold_checkpoint
from flashnorm.checkpoint.lora import translate_lora
from flashnorm.errors import CheckpointError, OutputError
from tests.checkpoint.lora_cases import (
    CASES,
    SMALL,
    Case,
    Folded,
    load,
    logits,
    relative,
    write_adapter,
    write_base,
    write_case,
)

# Power-of-two gains make the translation of an RMSNorm model exact; what remains is fp64 arithmetic in another order,
# some 1e-16 a step. A LayerNorm's bias is folded into fp32 biases: 2^-24 = 6e-8 for each of the 8 that meet in a logit.
EXACT, ROUNDED = 1e-12, 5e-7


# PEFT warns of what some of these tests are about: a tied head that is adapted apart from its embedding.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`", "ignore:The following .*_pattern"
)


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folded:
    return write_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folded:
    return write_case("llama", tmp_path_factory.mktemp("llama"))


def _bound(pair: Folded) -> float:
    return EXACT if pair.case.exact else ROUNDED


def test_an_adapter_of_the_original_does_the_same_on_the_folded_base(written: Folded, tmp_path: Path) -> None:
    translate_lora(written.adapter, written.folded, tmp_path / "out")
    expected = logits(written.case, written.base, written.adapter)
    assert relative(logits(written.case, written.folded, tmp_path / "out"), expected) < _bound(written)
    # The control: without translation it loads without a word, and is wrong.
    assert relative(logits(written.case, written.folded, written.adapter), expected) > 0.05


def test_an_adapter_of_the_folded_base_does_the_same_on_the_original(written: Folded, tmp_path: Path) -> None:
    translate_lora(written.adapter, written.folded, tmp_path / "out", to="original")
    expected = logits(written.case, written.folded, written.adapter)
    assert relative(logits(written.case, written.base, tmp_path / "out"), expected) < _bound(written)
    assert relative(logits(written.case, written.base, written.adapter), expected) > 0.05


def test_back_and_forth_gives_the_adapter_again(written: Folded, tmp_path: Path) -> None:
    translate_lora(written.adapter, written.folded, tmp_path / "there")
    translate_lora(tmp_path / "there", written.folded, tmp_path / "back", to="original")
    before, there, back = (load_file(f / WEIGHTS) for f in (written.adapter, tmp_path / "there", tmp_path / "back"))
    for key, tensor in back.items():
        # Biases are rounded once on each way, by at most half a unit in the last place; factors are not rounded at all.
        rounding = 2.0**-24 * (there[key].abs() + tensor.abs()) if key.endswith(".bias") else 0.0
        # A LayerNorm's adapter was given biases on the way, which are zero again.
        error = (tensor - before.get(key, torch.zeros_like(tensor))).abs()
        assert (error <= rounding).all(), key
    assert before.keys() <= back.keys()
    config = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(written.base)


def test_the_wrong_factor_scaled_is_seen(llama: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the logits check: an adapter divided where it should be multiplied, or scaled at its output."""
    expected = logits(llama.case, llama.base, llama.adapter)
    right = lora.algebra.fold_lora
    monkeypatch.setattr(lora.algebra, "fold_lora", lora.algebra.unfold_lora)
    translate_lora(llama.adapter, llama.folded, tmp_path / "divided")
    assert relative(logits(llama.case, llama.folded, tmp_path / "divided"), expected) > 0.05
    monkeypatch.setattr(
        lora.algebra, "fold_lora", lambda a, b, gain, axis, channels: right(a * 2, b, gain, axis, channels)
    )
    translate_lora(llama.adapter, llama.folded, tmp_path / "doubled")
    assert relative(logits(llama.case, llama.folded, tmp_path / "doubled"), expected) > 0.05


def test_a_moved_bias_left_out_of_the_adapter_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write_case("gpt2", tmp_path)
    monkeypatch.setattr(lora.algebra, "lora_shift", lambda a, b, shift, channels: torch.zeros(b.shape[0]).double())
    translate_lora(pair.adapter, pair.folded, tmp_path / "out")
    expected = logits(pair.case, pair.base, pair.adapter)
    assert relative(logits(pair.case, pair.folded, tmp_path / "out"), expected) > 0.05


def test_the_report_says_what_was_scaled(llama: Folded, tmp_path: Path) -> None:
    report = translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    layers = [f"model.layers.{i}" for i in range(2)]
    read = [f"{layer}.{name}" for layer in layers for name in ("mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj")]
    other = [f"{layer}.{name}" for layer in layers for name in ("mlp.down_proj", "self_attn.o_proj")]
    copies = {"lm_head.weight", "model.embed_tokens.weight"} & {*report.scaled, *report.unchanged}
    assert {*report.scaled} - copies == {*read, "lm_head"}
    assert {*report.unchanged} - copies == {*other, "model.embed_tokens"}
    assert report.shifted == ()
    assert (report.out, report.side, report.base) == (str(tmp_path / "out"), "folded", str(llama.folded))


def test_the_base_is_named_by_an_absolute_path(llama: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama.folded.parent)
    report = translate_lora(llama.adapter, llama.folded.name, tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == report.base == str(llama.folded)


def test_everything_else_is_kept(llama: Folded, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(llama.adapter, adapter)
    (adapter / "runs").mkdir()
    (adapter / "runs" / "events").write_bytes(b"\x00\xff")
    (adapter / "tokenizer.json").write_text("{}")
    save_file(load_file(adapter / WEIGHTS), adapter / WEIGHTS, metadata={"format": "pt", "note": "kept"})
    translate_lora(adapter, llama.folded, tmp_path / "out")
    changed = {CONFIG, WEIGHTS, NOTE}
    files = {p.relative_to(adapter).as_posix() for p in adapter.rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()} == (
        files | changed
    )
    for name in files - changed:
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    before, after = (json.loads((folder / CONFIG).read_text()) for folder in (adapter, tmp_path / "out"))
    assert after == {**before, "base_model_name_or_path": str(llama.folded), "revision": None}
    assert lora.open_adapter(tmp_path / "out").metadata == {"format": "pt", "note": "kept"}


def test_bf16_factors_are_rounded_once(llama: Folded, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(llama.adapter, adapter)
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(tensors, adapter / WEIGHTS)
    translate_lora(adapter, llama.folded, tmp_path / "out")
    gain = load_file(llama.base / "model.safetensors")["model.layers.0.input_layernorm.weight"]
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(load_file(tmp_path / "out" / WEIGHTS)[key], (tensors[key].double() * gain).bfloat16())


def test_an_untied_head_and_copies_of_it(tmp_path: Path) -> None:
    """A tied model, trained with whole copies of embedding and head, on a base whose head was untied and folded."""
    case = CASES["llama"]
    base = write_base(case, tmp_path / "base", tie_word_embeddings=True)
    fold_checkpoint(base, tmp_path / "folded", untie=True)
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    adapter = write_adapter(case, base, tmp_path / "adapter", **settings)
    report = translate_lora(adapter, tmp_path / "folded", tmp_path / "out")
    assert "lm_head.weight" in report.scaled
    assert "model.embed_tokens.weight" in report.unchanged
    expected = logits(case, base, adapter)
    assert relative(logits(case, tmp_path / "folded", tmp_path / "out"), expected) < EXACT
    assert relative(logits(case, tmp_path / "folded", adapter), expected) > 0.05


def test_a_tied_head_that_was_left_alone(tmp_path: Path) -> None:
    case = CASES["llama"]
    base = write_base(case, tmp_path / "base", tie_word_embeddings=True)
    fold_checkpoint(base, tmp_path / "folded")
    settings = {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 5]}
    adapter = write_adapter(case, base, tmp_path / "adapter", **settings)
    report = translate_lora(adapter, tmp_path / "folded", tmp_path / "out")
    assert {"lm_head", "model.embed_tokens"} <= {*report.unchanged}
    expected = logits(case, base, adapter)
    assert relative(logits(case, tmp_path / "folded", tmp_path / "out"), expected) < EXACT


def test_experts_adapted_one_by_one_before_transformers_merged_them(tmp_path: Path) -> None:
    """Mixtral adapters of Transformers 4 name modules that the model no longer has; PEFT merges them on loading."""
    pair = write_case("mixtral", tmp_path)
    generator = torch.Generator().manual_seed(2)
    sides = {"w1": (16, 24), "w2": (24, 16), "w3": (16, 24)}
    tensors = {}
    for layer in range(2):
        for expert in range(4):
            for name, (inputs, outputs) in sides.items():
                module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(2, inputs, generator=generator)
                tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(outputs, 2, generator=generator)
    config = json.loads((pair.adapter / CONFIG).read_text())
    config |= {"target_modules": ["w1", "w2", "w3"], "target_parameters": None}
    (pair.adapter / CONFIG).write_text(json.dumps(config))
    save_file(tensors, pair.adapter / WEIGHTS)
    report = translate_lora(pair.adapter, pair.folded, tmp_path / "out")
    assert len(report.scaled) == 2 * 4 * 2
    expected = logits(pair.case, pair.base, pair.adapter)
    assert relative(logits(pair.case, pair.folded, tmp_path / "out"), expected) < EXACT
    assert relative(logits(pair.case, pair.folded, pair.adapter), expected) > 0.05


def test_an_adapter_trained_on_the_model_without_its_head(llama: Folded, tmp_path: Path) -> None:
    """Its keys lack the prefix of the head's model; the same translated factors come out."""
    adapter = tmp_path / "adapter"
    shutil.copytree(llama.adapter, adapter)
    tensors = {k: t for k, t in load_file(adapter / WEIGHTS).items() if ".layers." in k}
    save_file({k.replace("model.model.model.", "model.model."): t for k, t in tensors.items()}, adapter / WEIGHTS)
    translate_lora(adapter, llama.folded, tmp_path / "short")
    translate_lora(llama.adapter, llama.folded, tmp_path / "long")
    short, long = load_file(tmp_path / "short" / WEIGHTS), load_file(tmp_path / "long" / WEIGHTS)
    assert len(short) == len(tensors)
    for key, tensor in short.items():
        assert torch.equal(tensor, long[key.replace("base_model.model.", "base_model.model.model.")])


# ------------------------------------------------------------------------------------------------------- refusals


def test_translating_twice_is_refused(llama: Folded, tmp_path: Path) -> None:
    translate_lora(llama.adapter, llama.folded, tmp_path / "once")
    with pytest.raises(CheckpointError, match="translated for the folded base already"):
        translate_lora(tmp_path / "once", llama.folded, tmp_path / "twice")
    translate_lora(tmp_path / "once", llama.folded, tmp_path / "back", to="original")
    with pytest.raises(CheckpointError, match="translated for the original base already"):
        translate_lora(tmp_path / "back", llama.folded, tmp_path / "twice", to="original")
    translate_lora(tmp_path / "back", llama.folded, tmp_path / "again")
    assert not (tmp_path / "twice").exists()


def test_the_base_of_another_fold_is_refused(llama: Folded, tmp_path: Path) -> None:
    translate_lora(llama.adapter, llama.folded, tmp_path / "there")
    shutil.copytree(llama.base, tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    fold_checkpoint(tmp_path / "other", tmp_path / "other-folded")
    with pytest.raises(CheckpointError, match="translated for another fold"):
        translate_lora(tmp_path / "there", tmp_path / "other-folded", tmp_path / "back", to="original")


def test_an_unfolded_base_is_refused(llama: Folded, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no flashnorm\.json"):
        translate_lora(llama.adapter, llama.base, tmp_path / "out")


def test_a_zero_gain_is_refused_on_the_way_back_only(llama: Folded, tmp_path: Path) -> None:
    shutil.copytree(llama.base, tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.layers.1.post_attention_layernorm.weight"][6] = 0
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    fold_checkpoint(tmp_path / "base", tmp_path / "folded")
    translate_lora(llama.adapter, tmp_path / "folded", tmp_path / "out")
    expected = logits(llama.case, tmp_path / "base", llama.adapter)
    assert relative(logits(llama.case, tmp_path / "folded", tmp_path / "out"), expected) < EXACT
    with pytest.raises(
        CheckpointError, match=r"post_attention_layernorm is zero at channel 6, .*layers\.1\.mlp\.up_proj"
    ):
        translate_lora(llama.adapter, tmp_path / "folded", tmp_path / "back", to="original")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "folded", "out"]


def test_overflow_is_refused(llama: Folded, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(llama.adapter, adapter)
    tensors = {key: tensor.half() for key, tensor in load_file(adapter / WEIGHTS).items()}
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][:] = 6e4
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A.weight' leaves the range of torch.float16"):
        translate_lora(adapter, llama.folded, tmp_path / "out")


def test_an_adapter_that_trains_a_norm_is_refused(llama: Folded, tmp_path: Path) -> None:
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]}
    adapter = write_adapter(llama.case, llama.base, tmp_path / "adapter", **settings)
    with pytest.raises(CheckpointError, match=r"changes the norm model\.layers\.0\.input_layernorm"):
        translate_lora(adapter, llama.folded, tmp_path / "out")


@pytest.mark.parametrize("setting", ["trainable_token_indices", "ensure_weight_tying"])
def test_settings_that_act_on_a_tied_head_are_refused_on_an_untied_base(setting: str, tmp_path: Path) -> None:
    case = CASES["llama"]
    base = write_base(case, tmp_path / "base", tie_word_embeddings=True)
    fold_checkpoint(base, tmp_path / "folded", untie=True)
    adapter = write_adapter(case, base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, setting: [1]}))
    with pytest.raises(CheckpointError, match=f"sets {setting}, which acts on a tied head"):
        translate_lora(adapter, tmp_path / "folded", tmp_path / "out")


@pytest.mark.parametrize("place", ["existing", "adapter/inside", "folded/inside", "missing/out"])
def test_the_output_must_be_new_and_elsewhere(place: str, llama: Folded, tmp_path: Path) -> None:
    shutil.copytree(llama.adapter, tmp_path / "adapter")
    shutil.copytree(llama.folded, tmp_path / "folded")
    (tmp_path / "existing").mkdir()
    with pytest.raises(OutputError):
        translate_lora(tmp_path / "adapter", tmp_path / "folded", tmp_path / place)
    assert not [p for p in tmp_path.rglob("*") if "partial" in p.name]


def test_nothing_is_left_when_writing_fails(llama: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, name: str, data: bytes, *last: str) -> None:
        (folder / name).write_bytes(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lora, "write_file", full)
    with pytest.raises(OutputError, match="the disk became full"):
        translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_behind_is_removed(llama: Folded, tmp_path: Path) -> None:
    (tmp_path / ".out.flashnorm-partial-0000").mkdir()
    translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_second_run_to_the_same_output_spoils_neither(
    llama: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two runs is half-way when the other begins and ends: exactly one adapter appears, and it is whole."""
    unchanged = lora.write_file
    second: list[str] = []

    def write_then_let_the_other_run(folder: Path, name: str, data: bytes, *last: str) -> None:
        unchanged(folder, name, data, *last)
        if not second:
            second.append("running")
            translate_lora(llama.adapter, llama.folded, tmp_path / "out")

    monkeypatch.setattr(lora, "write_file", write_then_let_the_other_run)
    with pytest.raises(OutputError, match="was made by someone else meanwhile"):
        translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    monkeypatch.undo()
    translate_lora(llama.adapter, llama.folded, tmp_path / "alone")
    whole = {p.name: p.read_bytes() for p in (tmp_path / "alone").iterdir() if p.is_file()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()} == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "out"]


def test_a_folder_made_meanwhile_is_not_replaced(
    llama: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged = lora.write_file

    def write_and_make(folder: Path, name: str, data: bytes, *last: str) -> None:
        unchanged(folder, name, data, *last)
        (tmp_path / "out").mkdir(exist_ok=True)

    monkeypatch.setattr(lora, "write_file", write_and_make)
    with pytest.raises(OutputError, match="was made by someone else meanwhile"):
        translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_norm_bias_that_moved_behind_an_embedding_adapter_is_refused(tmp_path: Path) -> None:
    """PEFT's `lora_bias` is one switch for the whole adapter, and embeddings do not know it."""
    pair = write_case("gpt2", tmp_path)
    adapter = write_adapter(pair.case, pair.base, tmp_path / "second", target_modules=["c_attn", "wte"], bias="none")
    with pytest.raises(CheckpointError, match=r"c_attn needs a bias.*beside an adapter of transformer\.wte"):
        translate_lora(adapter, pair.folded, tmp_path / "out")


@pytest.fixture(scope="module")
def replacing(tmp_path_factory: pytest.TempPathFactory) -> Folded:
    """An adapter that replaces a linear behind a LayerNorm whose bias moves into it."""
    folder = tmp_path_factory.mktemp("replacing")
    pair = write_case("gpt2", folder)
    adapter = write_adapter(
        pair.case, pair.base, folder / "second", target_modules=["c_attn"], modules_to_save=["c_fc"]
    )
    return replace(pair, adapter=adapter)


def test_a_replaced_linear_takes_its_own_share_of_a_moved_bias(replacing: Folded, tmp_path: Path) -> None:
    translate_lora(replacing.adapter, replacing.folded, tmp_path / "there")
    expected = logits(replacing.case, replacing.base, replacing.adapter)
    assert relative(logits(replacing.case, replacing.folded, tmp_path / "there"), expected) < ROUNDED
    translate_lora(replacing.adapter, replacing.folded, tmp_path / "back", to="original")
    expected = logits(replacing.case, replacing.folded, replacing.adapter)
    assert relative(logits(replacing.case, replacing.base, tmp_path / "back"), expected) < ROUNDED


def test_the_base_s_share_of_a_moved_bias_in_a_replaced_linear_is_seen(
    replacing: Folded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_moved_into", lambda base, path, weight, to, adapter: weight.moved)
    translate_lora(replacing.adapter, replacing.folded, tmp_path / "there")
    expected = logits(replacing.case, replacing.base, replacing.adapter)
    assert relative(logits(replacing.case, replacing.folded, tmp_path / "there"), expected) > 0.05


def test_a_copied_weight_without_its_bias_must_be_the_base_s_own(replacing: Folded, tmp_path: Path) -> None:
    """PEFT copies embeddings and heads so, trained or not."""
    adapter = tmp_path / "adapter"
    shutil.copytree(replacing.adapter, adapter)
    tensors = load_file(adapter / WEIGHTS)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("c_fc.bias")}
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"into a bias that the adapter does not hold"):
        translate_lora(adapter, replacing.folded, tmp_path / "out")
    own = load_file(replacing.base / "model.safetensors")
    for key in tensors:
        if key.endswith("c_fc.weight"):
            tensors[key] = own[key.removeprefix("base_model.model.")]
    save_file(tensors, adapter / WEIGHTS)
    translate_lora(adapter, replacing.folded, tmp_path / "out")
    folded, translated = load_file(replacing.folded / "model.safetensors"), load_file(tmp_path / "out" / WEIGHTS)
    for key in tensors:
        if key.endswith("c_fc.weight"):
            assert torch.equal(translated[key], folded[key.removeprefix("base_model.model.")])


@pytest.fixture(scope="module")
def roomier(tmp_path_factory: pytest.TempPathFactory) -> Folded:
    """A base whose linears were given biases for a LayerNorm's to move to."""
    folder = tmp_path_factory.mktemp("roomier")
    case = Case(
        "StableLmForCausalLM",
        "StableLmConfig",
        {**SMALL, "num_key_value_heads": 2, "use_qkv_bias": False},
        {"target_modules": ["q_proj", "up_proj"]},
        exact=False,
    )
    base = write_base(case, folder / "base")
    fold_checkpoint(base, folder / "folded", add_bias=True)
    return Folded(case, base, folder / "folded", write_adapter(case, base, folder / "adapter"))


@pytest.mark.filterwarnings("ignore:.*lora_bias.*")
def test_an_adapter_moves_to_a_base_with_new_biases(roomier: Folded, tmp_path: Path) -> None:
    report = translate_lora(roomier.adapter, roomier.folded, tmp_path / "out")
    assert report.shifted == tuple(f"model.layers.{i}.self_attn.q_proj" for i in range(2))
    expected = logits(roomier.case, roomier.base, roomier.adapter)
    assert relative(logits(roomier.case, roomier.folded, tmp_path / "out"), expected) < ROUNDED
    assert relative(logits(roomier.case, roomier.folded, roomier.adapter), expected) > 0.05
    translate_lora(roomier.adapter, roomier.folded, tmp_path / "back", to="original")
    expected = logits(roomier.case, roomier.folded, roomier.adapter)
    assert relative(logits(roomier.case, roomier.base, tmp_path / "back"), expected) < ROUNDED


def test_what_an_adapter_cannot_hold_of_new_biases_is_refused(roomier: Folded, tmp_path: Path) -> None:
    replaced = write_adapter(roomier.case, roomier.base, tmp_path / "replaced", modules_to_save=["k_proj"])
    with pytest.raises(CheckpointError, match=r"k_proj\.weight'.* into a bias that the adapter does not hold"):
        translate_lora(replaced, roomier.folded, tmp_path / "out")
    trained = write_adapter(roomier.case, roomier.folded, tmp_path / "trained", bias="lora_only")
    with pytest.raises(CheckpointError, match=r"q_proj\.bias', a bias that the original base does not have"):
        translate_lora(trained, roomier.folded, tmp_path / "out", to="original")


def test_peft_still_merges_a_translated_adapter(llama: Folded, tmp_path: Path) -> None:
    from peft import PeftModel

    translate_lora(llama.adapter, llama.folded, tmp_path / "out")
    model = PeftModel.from_pretrained(load(llama.case, llama.folded, torch.float64), tmp_path / "out").double()
    merged = model.merge_and_unload().eval()
    with torch.no_grad():
        actual = merged(input_ids=torch.arange(12)[None] * 5 % 32).logits
    assert relative(actual, logits(llama.case, llama.base, llama.adapter)) < EXACT
