"""The comparisons with float64: stock sites pass in every dtype, planted faults do not."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest
import torch
from torch import nn

from flashnorm.runtime import modules
from flashnorm.runtime.checking import Watch, require_formula
from flashnorm.runtime.observing import find_probe, observe
from flashnorm.runtime.planning import Stock
from flashnorm.runtime.replace import replace
from flashnorm.sites.audit import audit
from tests.runtime.small import Block, GatedBlock, Norm, Sequence, Sum
from tests.runtime.test_planning import plan_of

NORM = "blocks.0.norm"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def prepared(norm=None, dtype=torch.float32):
    model = Sequence(Block(Sum(True, True), norm), Block(GatedBlock())).to(dtype)
    return model, plan_of(model), observe(model, find_probe(model), {site.norm for site in audit(model).sites})


class AllInOneDtype(Norm):
    """Rounds after every step, as norms do that never leave the activation's dtype."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [Norm(1e-5), Norm(1e-6, 1.0), AllInOneDtype(1e-4), nn.RMSNorm(32, 1e-5)])
def test_what_stock_computes_is_within_the_bound(norm, dtype):
    require_formula(*prepared(norm, dtype))


@pytest.mark.parametrize(
    ("eps", "dtype"),
    [*((eps, dtype) for eps in (1e-6, 1e-4) for dtype in DTYPES), (0.999e-5, torch.float32), (1.001e-5, torch.float32)],
)
def test_a_wrong_epsilon_is_caught(eps, dtype):
    model, plan, seen = prepared(dtype=dtype)
    with pytest.raises(Stock, match="differs from RMSNorm and linear"):
        require_formula(model, changed(plan, eps=eps), seen)


def test_a_wrong_convention_is_caught():
    model, plan, seen = prepared()
    with pytest.raises(Stock, match="as observed"):
        require_formula(model, changed(plan, offset=1.0), seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_turns_out_to_be_another_is_caught(dtype):
    """It was traced as a norm; on the live model its output is twice as large."""
    model, plan, seen = prepared(dtype=dtype)
    model.blocks[0].norm.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(Stock, match="as observed"):
        require_formula(model, plan, seen)


def excess(model, seen_plans):
    for plan in seen_plans:
        replace(model, plan)
    watch = Watch(model)
    with watch.watching():
        find_probe(model).run(model)
    return watch.excess


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_stand_in_is_compared_and_within_its_bound(dtype):
    model, plan, _ = prepared(dtype=dtype)
    found = excess(model, [plan, plan_of(model, "blocks.1.norm")])
    assert sorted(found) == ["blocks.0.inner.linears.0", "blocks.0.inner.linears.1", "blocks.1.inner"]
    assert max(found.values()) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [lambda y: 2 * y, lambda y: -y, lambda y: y.roll(1, -1), lambda y: y * float("nan")])
@pytest.mark.parametrize("product", ["rms_product", "gated_product"])
def test_a_product_with_a_fault_exceeds_its_bound(monkeypatch, product, fault, dtype):
    right = getattr(modules, product)
    monkeypatch.setattr(modules, product, lambda *args: fault(right(*args)))
    model, plan, _ = prepared(dtype=dtype)
    found = excess(model, [plan, plan_of(model, "blocks.1.norm")])
    faulty = {name for name, worst in found.items() if not worst <= 1}
    assert faulty == {"blocks.1.inner"} if product == "gated_product" else {name for name in found if "linears" in name}


def test_parts_that_changed_places_exceed_the_bound():
    model, plan, _ = prepared()
    done = replace(model, plan)
    first, second = done.groups[0].linears
    first.part, second.part = second.part, first.part
    watch = Watch(model)
    with watch.watching():
        find_probe(model).run(model)
    assert min(watch.excess[f"blocks.0.inner.linears.{i}"] for i in (0, 1)) > 1
