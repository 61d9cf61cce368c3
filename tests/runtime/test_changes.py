"""What is changed on a model after it was accelerated to level two is seen before the program runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flashnorm
from flashnorm.errors import Unsupported
from flashnorm.runtime.changes import Snapshot, anything_attached
from tests.runtime.small import llama, prompt

GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
SECOND = llama(seed=1)


def hooked(model: nn.Module) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output.flip(-1))


def other_forward(model: nn.Module) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: -own(x)


def other_head(model: nn.Module) -> None:
    model.lm_head = SECOND.lm_head


def other_parameter(model: nn.Module) -> None:
    model.lm_head.weight = SECOND.lm_head.weight


def other_memory(model: nn.Module) -> None:
    model.lm_head.weight.data = SECOND.lm_head.weight.detach().clone()


def written(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(-1)


def loaded(model: nn.Module) -> None:
    model.model.load_state_dict(SECOND.model.state_dict())


def converted(model: nn.Module) -> None:
    model.model.to(torch.bfloat16)
    model.lm_head.to(torch.bfloat16)


def shortened(model: nn.Module) -> None:
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


def adapted(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False), model).eval()


def trained(model: nn.Module) -> None:
    model.train()


CHANGES: dict[Callable[[nn.Module], None], str] = {
    hooked: "a hook hangs on model.layers.0,",
    other_forward: "the forward of lm_head was replaced",
    other_head: "lm_head was replaced",
    other_parameter: "lm_head.weight was given other values",
    other_memory: "lm_head.weight was given other values",
    written: "model.layers.0.input_layernorm.weight was given other values",
    loaded: "was given other values",
    converted: "was given other values",
    shortened: "model.layers was replaced",
    adapted: "o_proj was replaced",
    trained: "training mode",
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_a_changed_model_generates_like_the_stock_one_and_says_why(change, sentence):
    model, stock = flashnorm.accelerate(llama(), level=2, max_batch=2, max_length=32), llama()
    change(model), change(stock)
    with pytest.warns(UserWarning, match=f"stock path, because .*{sentence}"):
        answer = model.generate(prompt(), **GREEDY)
    assert torch.equal(answer, stock.generate(prompt(), **GREEDY))


def test_the_changes_show_in_the_text():
    """What the program would have given is not what the changed models give."""
    before = llama().generate(prompt(), **GREEDY)
    for change in CHANGES.keys() - {trained, converted}:
        model = llama()
        change(model)
        assert not torch.equal(model.generate(prompt(), **GREEDY), before), change.__name__


def test_an_unchanged_model_has_no_changes():
    model = flashnorm.accelerate(llama(), level=2, max_batch=2, max_length=32)
    snapshot = Snapshot(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this call of generate")
        model.generate(prompt(), **GREEDY)
    with torch.inference_mode():
        assert snapshot.change(model) is None


@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_was_asked_for_hidden_states_still_runs_its_program(before):
    """Transformers leaves hooks behind; and it may leave a forward that is the class's own."""
    model = llama()
    model.lm_head.forward = model.lm_head.forward

    def ask() -> int:
        with torch.no_grad():
            return len(model(prompt(), output_hidden_states=True).hidden_states)

    count = ask() if before else 3
    flashnorm.accelerate(model, level=2, max_batch=2, max_length=32)
    assert ask() == count
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this call of generate")
        assert torch.equal(model.generate(prompt(), **GREEDY), llama().generate(prompt(), **GREEDY))


def test_parameters_made_in_inference_mode_are_compared_too():
    model = llama()
    snapshot = Snapshot(model)
    with torch.inference_mode():
        model.lm_head.weight = nn.Parameter(torch.ones(128, 32), requires_grad=False)
    assert snapshot.change(model) == "lm_head.weight was given other values"


@pytest.mark.parametrize("change", [hooked, other_forward])
def test_what_hangs_on_a_model_before_stands_in_the_way_of_a_program(change):
    model = llama()
    assert anything_attached(model) is None
    change(model)
    with pytest.raises(Unsupported, match="a decode program would not call it"):
        flashnorm.accelerate(model, level=2)
    assert not hasattr(model, "acceleration")
