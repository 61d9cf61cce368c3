"""What is put in the place of accelerated modules, or hooked onto them, works as on the stock model, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flashnorm
from flashnorm.errors import Refusal
from tests.coverage.examine import TOLERANCE
from tests.runtime.small import llama, prompt

LAYER = "model.layers.0"
# Whether hooks before and behind it can be followed.
HOOKS = {
    "input_layernorm": (True, False),
    "self_attn.q_proj": (False, True),
    "self_attn.o_proj": (True, True),
    "mlp": (False, True),
    "mlp.gate_proj": (False, False),
    "mlp.up_proj": (False, False),
    "mlp.act_fn": (False, False),
    "mlp.down_proj": (True, True),
}
REPLACEABLE = {name: name in ("self_attn.o_proj", "mlp.down_proj") for name in HOOKS if name != "mlp"}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(prompt()).logits


def assert_followed_or_refused(name: str, model: nn.Module, stock: nn.Module, *, followed: bool) -> None:
    if followed:
        assert (logits(model) - logits(stock)).norm() <= TOLERANCE * logits(stock).norm()
        return
    with pytest.raises(Refusal, match=rf"{name}\b.*call model.unaccelerate\(\) first"):
        logits(model)
    model.unaccelerate()
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name, behind):
    model, stock = flashnorm.accelerate(llama()), llama()
    before = logits(stock)
    for each in (model, stock):
        module = each.get_submodule(f"{LAYER}.{name}")
        if behind:
            module.register_forward_hook(lambda module, args, output: output * 2 + 1)
        else:
            module.register_forward_pre_hook(lambda module, args: (args[0].flip(-1) + 1,))
    assert not torch.equal(logits(stock), before)
    assert_followed_or_refused(name, model, stock, followed=HOOKS[name][behind])


@pytest.mark.parametrize("name", REPLACEABLE)
def test_other_modules(name):
    model, stock, other = flashnorm.accelerate(llama()), llama(), llama(seed=1).get_submodule(f"{LAYER}.{name}")
    other = nn.Tanh() if name == "mlp.act_fn" else other
    path, _, child = f"{LAYER}.{name}".rpartition(".")
    for each in (model, stock):
        setattr(each.get_submodule(path), child, other)
    assert_followed_or_refused(name, model, stock, followed=REPLACEABLE[name])


def test_a_copy_looks_at_its_own_places():
    model = flashnorm.accelerate(llama())
    copied = copy.deepcopy(model)
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    assert torch.equal(logits(copied), logits(flashnorm.accelerate(llama())))
    copied.model.layers[1].mlp.act_fn = nn.Tanh()
    with pytest.raises(Refusal, match=r"layers.1.mlp.act_fn was replaced"):
        logits(copied)
