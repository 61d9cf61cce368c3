"""What else is done to a model while it is accelerated: saved, loaded, copied, pickled, moved, converted, compiled."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from transformers import AutoModelForCausalLM

import flashnorm
from flashnorm.errors import GradientError, Refusal
from tests.runtime.small import bits, llama, prompt, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.no_grad()
def logits(model):
    return model(prompt()).logits


@pytest.fixture
def model():
    return flashnorm.accelerate(llama())


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_it_is_saved_like_the_stock_model(model, tmp_path):
    model.save_pretrained(tmp_path / "accelerated")
    llama().save_pretrained(tmp_path / "stock")
    names = ("accelerated", "stock")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in names]
    assert files[0] == files[1]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "accelerated")
    assert torch.equal(logits(reloaded), logits(llama()))


@pytest.mark.parametrize("assign", [False, True])
def test_other_weights_are_loaded_into_the_products(model, assign):
    other = llama(seed=1)
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=assign)
    assert torch.equal(logits(model), logits(flashnorm.accelerate(llama(seed=1))))
    assert torch.equal(logits(model.unaccelerate()), logits(other))


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_copy_is_a_model_of_its_own(model, make):
    before, stored = logits(model), bits(model)
    copied = make(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(copied), before)
    assert same_bits(copied, stored)
    assert copied.unaccelerate() is copied
    assert torch.equal(logits(copied), logits(llama()))
    assert type(copied.model.layers[0].mlp) is type(llama().model.layers[0].mlp)
    assert hasattr(model, "acceleration")


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()])
def test_a_converted_model_is_the_accelerated_converted_one(model, convert):
    converted = convert(model)
    assert torch.equal(logits(converted), logits(flashnorm.accelerate(convert(llama()))))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert torch.equal(logits(converted.unaccelerate()), logits(convert(llama())))


def test_a_model_without_memory_gets_its_weights_later(model):
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(llama().state_dict())
    stock = llama()
    model.model.rotary_emb = stock.model.rotary_emb  # not stored, so not loaded either
    assert torch.equal(logits(model), logits(flashnorm.accelerate(stock)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_one_graph_without_breaks(model, mode):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with mode():
        assert torch.equal(compiled(prompt()).logits, model(prompt()).logits)


def test_running_eagerly_in_between_compiles_nothing_again(model):
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        first = compiled(prompt()).logits
        model(prompt()), model(prompt(9))
        assert torch.equal(compiled(prompt()).logits, first)
    assert len(seen) == 1


def test_a_copy_that_was_never_run_says_so_when_it_is_compiled(model):
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="run a copied or converted accelerated model once"), torch.no_grad():
        compiled(prompt())


def test_gradients_are_refused_until_it_is_restored(model):
    with pytest.raises(GradientError, match="no backward"):
        model(prompt())
    model.train()
    with pytest.raises(GradientError, match=r"model.unaccelerate\(\) to train it"):
        model(prompt())
    loss = model.unaccelerate()(prompt(), labels=prompt()).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_exist_once(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
    products = [group for module in model.modules() for group in getattr(module, "groups", ())]
    assert products
    assert all(group.weight.untyped_storage().data_ptr() in storages for group in products)


def test_an_adapter_cannot_be_put_on_a_reader(model):
    """It would read what is not normed yet."""
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="is not supported"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("transform", [flashnorm.audit, flashnorm.fold])
def test_a_pass_over_its_norms_is_refused(transform, level):
    """Most of them are not where a pass would look for them."""
    model = flashnorm.accelerate(llama(), level=level, max_batch=1, max_length=16)
    with pytest.raises(Refusal, match=r"is accelerated.*call model.unaccelerate\(\) first"):
        transform(model)
    transform(model.unaccelerate())


def test_the_report_is_printed_and_goes_with_the_acceleration(model):
    assert "q_proj + k_proj + v_proj" in str(model.acceleration)
    model.unaccelerate()
    with pytest.raises(AttributeError):
        model.acceleration  # noqa: B018
    with pytest.raises(Refusal):
        flashnorm.accelerate(model, level=9)
