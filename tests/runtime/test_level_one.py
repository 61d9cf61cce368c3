"""Level one as a whole: what differs is put back, and a failure leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flashnorm.runtime import level_one, modules
from flashnorm.runtime.level_one import apply_level_one, undo_level_one
from tests.runtime.small import Block, GatedBlock, Norm, Sequence, Sum, bits, prompt, same_bits


def model():
    return Sequence(Block(Sum(True, True, False)), Block(GatedBlock(), Norm(1e-6, 1.0)), Block(GatedBlock(F.gelu)))


@torch.no_grad()
def logits(of):
    return of(prompt())["logits"]


def kinds(of):
    return {name: id(module) for name, module in of.named_modules()}


def test_the_model_computes_the_same_and_every_site_is_told():
    changed = model()
    before, logits_before, stock = bits(changed), logits(changed), kinds(changed)
    done = apply_level_one(changed)
    assert [site.products for site in done.sites] == [("0 + 1", "2"), ("silu(second) * first",), ("first + second",)]
    assert (logits(changed) - logits_before).norm() <= 1e-6 * logits_before.norm()
    assert same_bits(changed, before)
    undo_level_one(changed, done.replaced)
    assert kinds(changed) == stock
    assert same_bits(changed, before)
    assert torch.equal(logits(changed), logits_before)


@pytest.mark.parametrize(("product", "left"), [("rms_product", ["blocks.1.norm"]), ("gated_product", [])])
def test_a_site_whose_product_has_a_fault_is_put_back(monkeypatch, product, left):
    right = getattr(modules, product)
    monkeypatch.setattr(modules, product, lambda *args: 2 * right(*args))
    changed = model()
    logits_before, stock = logits(changed), kinds(changed)
    done = apply_level_one(changed)
    put_back = [site.norm for site in done.sites if site.reason.startswith("put back: ")]
    assert put_back == (["blocks.0.norm", "blocks.2.norm"] if product == "rms_product" else ["blocks.1.norm"])
    if product == "rms_product":  # what is left is right
        assert (logits(changed) - logits_before).norm() <= 1e-6 * logits_before.norm()
    undo_level_one(changed, done.replaced)
    assert kinds(changed) == stock
    assert torch.equal(logits(changed), logits_before)


@pytest.mark.parametrize("moment", ["replace", "_checked"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_in_between_leaves_the_model_as_it_was(monkeypatch, moment, error):
    changed = model()
    before, stock = bits(changed), kinds(changed)
    calls, right = [], getattr(level_one, moment)

    def fail(*args):
        calls.append(args)
        if moment == "replace" and len(calls) < 3:
            return right(*args)
        raise error("in the middle")

    monkeypatch.setattr(level_one, moment, fail)
    with pytest.raises(error):
        apply_level_one(changed)
    assert kinds(changed) == stock
    assert same_bits(changed, before)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in changed.parameters())
