"""Which sites may be replaced, with what, and for every other one the reason."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flashnorm.runtime.observing import find_probe, observe
from flashnorm.runtime.planning import Gate, Plan, Product, Stock, plan_site
from flashnorm.sites.audit import audit
from tests.runtime.small import WIDTH, Block, GatedBlock, Norm, Sequence, Sum, llama


def plan_of(model, norm="blocks.0.norm") -> Plan:
    report = audit(model)
    seen = observe(model, find_probe(model), {site.norm for site in report.sites})
    (site,) = (site for site in report.sites if site.norm == norm)
    return plan_site(model, site, report, seen)


def inner(*names):
    return tuple(f"blocks.0.inner.{name}" for name in names)


def test_readers_of_one_tensor_share_a_product():
    plan = plan_of(Sequence(Block(Sum(True, True, True))))
    assert plan.products == (Product(inner("linears.0", "linears.1", "linears.2")),)


def test_readers_with_and_without_a_bias_do_not():
    plan = plan_of(Sequence(Block(Sum(True, False, True))))
    assert plan.products == (Product(inner("linears.0", "linears.2")), Product(inner("linears.1")))


def test_a_gated_mlp_is_found_whatever_its_names_and_order():
    plan = plan_of(Sequence(Block(GatedBlock(F.silu))))
    assert plan.products == (Product(inner("second", "first"), Gate("blocks.0.inner", "last", "silu")),)


@pytest.mark.parametrize("block", [GatedBlock(F.gelu), GatedBlock(F.silu, bias=True)])
def test_another_activation_or_a_bias_leaves_two_merged_projections(block):
    assert plan_of(Sequence(Block(block))).products == (Product(inner("first", "second")),)


def test_an_mlp_that_adds_something_is_no_gated_mlp():
    class Skipping(GatedBlock):
        def forward(self, x):
            return super().forward(x) + 1

    assert plan_of(Sequence(Block(Skipping()))).products == (Product(inner("first", "second")),)


def test_an_mlp_with_a_hook_inside_is_left_to_run_as_it_is():
    model = Sequence(Block(GatedBlock()))
    model.blocks[0].inner.last.register_forward_hook(lambda *_: None)
    assert plan_of(model).products == (Product(inner("first", "second")),)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_convention_is_the_measured_one_with_the_exact_epsilon(offset):
    eps = 1.2345678e-5  # measured to five digits, so it must come from the module
    plan = plan_of(Sequence(Block(Sum(False), Norm(eps, offset))))
    assert (plan.gain, plan.offset, plan.eps) == ("weight", offset, eps)


def test_llama_is_planned_whole_but_for_its_last_norm():
    layer = "model.layers.1"
    attention = tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    assert plan_of(llama(), f"{layer}.input_layernorm").products == (Product(attention),)
    gated = Product((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), Gate(f"{layer}.mlp", "down_proj", "silu"))
    assert plan_of(llama(), f"{layer}.post_attention_layernorm").products == (gated,)
    with pytest.raises(Stock, match="also returned by model, to callers who want it normed"):
        plan_of(llama(), "model.norm")


class OutsideRoot(Norm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Scaled(Block):
    def forward(self, x):
        return x + self.inner(2 * self.norm(x))


class Functional(Block):
    def forward(self, x):
        return x + F.linear(self.norm(x), self.inner.linears[0].weight)


class Residual(Block):
    def forward(self, x):
        return self.norm(x) + self.inner(self.norm(x))


class OtherLinear(nn.Linear):
    """A reader of a kind that may compute something else than its name says."""


def with_reader(reader):
    block = Block(Sum(False))
    block.inner.linears[0] = reader
    return Sequence(block)


def with_replaced_forward():
    model = Sequence(Block(Sum(False)))
    reader = model.blocks[0].inner.linears[0]
    reader.forward = MethodType(lambda self, x: F.linear(x, self.weight), reader)
    return model


def with_hook(on):
    model = Sequence(Block(Sum(False)))
    model.get_submodule(on).register_forward_hook(lambda module, args, output: None)
    return model


def with_shared_reader():
    first, second = Sum(False), Sum(False)
    second.linears[0] = first.linears[0]
    return Sequence(Block(first), Block(second))


def with_tied_weight():
    model = Sequence(Block(Sum(False, False)))
    model.blocks[0].inner.linears[1].weight = model.blocks[0].inner.linears[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Sequence(Block(Sum(False), nn.LayerNorm(WIDTH))), "subtracts the mean"),
        (lambda: Sequence(Block(Sum(False), OutsideRoot(1e-3))), "does not stand inside the root"),
        (lambda: Sequence(Scaled(Sum(False))), "something else than exactly the norm's output"),
        (lambda: Sequence(Functional(Sum(False))), "never called as a module"),
        (lambda: Sequence(Residual(Sum(False))), "added to a tensor that does not carry the same gain"),
        (lambda: with_reader(OtherLinear(WIDTH, WIDTH, bias=False)), "belongs to a OtherLinear, not to a plain linear"),
        (with_replaced_forward, "was replaced by another library"),
        (lambda: with_hook("blocks.0.inner.linears.0"), "a hook hangs on blocks.0.inner.linears.0"),
        (lambda: with_hook("blocks.0.norm"), "hook"),
        (with_shared_reader, "read by different norms"),
        (with_tied_weight, "tied to"),
    ],
)
def test_what_stays_stock_says_why(model, reason):
    with pytest.raises(Stock, match=reason):
        plan_of(model())


def test_planning_leaves_the_model_alone():
    model = llama()
    before = {name: id(module) for name, module in model.named_modules()}
    with torch.no_grad():
        logits = model(torch.arange(3, 9)[None]).logits
    plan_of(model, "model.layers.0.input_layernorm")
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(torch.arange(3, 9)[None]).logits, logits)
