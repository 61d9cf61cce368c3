"""Approximate cancellation: nothing is off by more than is said, and what would be is kept exact."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashnorm import algebra
from flashnorm.errors import Refusal
from flashnorm.passes.approximate import epsilon_bounds
from flashnorm.passes.cancel import apply_cancel, cancel
from flashnorm.sites.cancelling import audit_cancellation
from tests.passes.test_cancel import Attention, Chain, Fused

LATER = ("nq", "nk", "nv")


def _x(seed, scale, width=8):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, 5, width, dtype=torch.float64, generator=generator)
    return rows * scale ** torch.rand(2, 5, 1, dtype=torch.float64, generator=generator)


def _outputs(model, x):
    """What the later norms return, and the model."""
    found = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: found.__setitem__(name, out))
        for name in LATER
    ]
    with torch.no_grad():
        found["model"] = model(x)
    for hook in hooks:
        hook.remove()
    return found


def _off(model, audit, bounds, x):
    """By how much each token of each later norm is off with its own epsilon, and whether it is within what was seen."""
    chosen = [c for c in audit.cancellations if c.verdict != "no"]
    exact, rough = copy.deepcopy(model), copy.deepcopy(model)
    apply_cancel(exact, chosen, audit)
    apply_cancel(rough, chosen, audit, LATER)
    right, wrong = _outputs(exact, x), _outputs(rough, x)
    square = algebra.carried_epsilon(x, model.n1.eps, 1.0)
    for name in LATER:
        off = (wrong[name] - right[name]).norm(dim=-1) / right[name].norm(dim=-1)
        y = model.split(getattr(model, name[1])(x * model.n1.weight))
        spread = square.unsqueeze(1 if model.layout == "heads first" else 2).expand(*y.shape[:-1], 1)[..., 0]
        low, high = bounds[name].r1_square
        within = (algebra.mean_square(y)[..., 0] >= bounds[name].least_mean_square) & (spread >= low) & (spread <= high)
        yield name, off, within


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    eps=st.tuples(st.sampled_from([1e-12, 1e-6, 1e-2]), st.sampled_from([1e-8, 1e-6, 1e-2])),
    layout=st.sampled_from(["heads last", "heads first"]),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 1e3]),
    seed=st.integers(0, 3),
)
@torch.no_grad()
def test_no_token_within_what_was_seen_is_off_by_more_than_the_bound(eps, layout, scale, seed):
    model = Attention("rms", "rms", 2, 16, eps, layout, norm_v=True).double()
    texts = [_x(seed + 10 * i, scale, 32) for i in range(3)]
    audit = audit_cancellation(model, inputs={"x": texts[0]})
    bounds = epsilon_bounds(model, audit.cancellations[:1], audit.probes, [{"x": text} for text in texts])
    assert set(bounds) == set(LATER)
    for text, calibrated in [(texts[0], True), (texts[2], True), (_x(seed + 5, scale, 32), False)]:
        for name, off, within in _off(model, audit, bounds, text):
            # The exact model and this one round alike but for some tens of 2^-53.
            assert not calibrated or (off <= bounds[name].bound * (1 + 1e-9) + 1e-13).all()
            assert (off[within] <= bounds[name].bound * (1 + 1e-9) + 1e-13).all()


@torch.no_grad()
def test_text_beyond_what_was_seen_is_off_by_more():
    """The negative control: the comparison above would see a bound that is too small."""
    model = Attention("rms", "rms", 2, 16, (1e-6, 1e-6), norm_v=True).double()
    audit = audit_cancellation(model, inputs={"x": _x(0, 1.0, 32)})
    bounds = epsilon_bounds(model, audit.cancellations[:1], audit.probes, [{"x": _x(0, 1.0, 32)}])
    for name, off, within in _off(model, audit, bounds, 1e-4 * _x(0, 1.0, 32)):
        assert off.max() > 100 * bounds[name].bound
        assert not within.any()


@torch.no_grad()
def test_a_limit_parts_the_norms_and_the_output_stays_within_it():
    model = Attention("rms", "rms", 2, 16, (1e-6, 1e-6), norm_v=True).double()
    model.k.weight.mul_(1e-3)  # its norm sees little more than its epsilon
    text = _x(0, 1.0, 32) * 0.1
    untouched = copy.deepcopy(model)
    report = cancel(model, inputs={"x": text}, approximate=1e-2, calibration=[{"x": text}])
    assert report.full == ["n1"]
    assert report.approximate == ("nq", "nv")
    assert report.bounds["nk"].bound > 1e-2 >= max(report.bounds[name].bound for name in ("nq", "nv"))
    assert type(model.nq) is nn.RMSNorm
    assert type(model.nk) is not nn.RMSNorm
    before, after = _outputs(untouched, text), _outputs(model, text)
    torch.testing.assert_close(after["nk"], before["nk"], rtol=1e-12, atol=1e-12)
    for name in ("nq", "nv"):
        off = (after[name] - before[name]).norm(dim=-1) / before[name].norm(dim=-1)
        assert 0 < off.max() <= report.bounds[name].bound * (1 + 1e-9)


@torch.no_grad()
def test_norms_in_a_row_stay_exact():
    model, text = Chain().double(), _x(0, 1e-3)
    before = model(text)
    report = cancel(model, inputs={"x": text}, approximate=1.0, calibration=[{"x": text}])
    assert report.full == ["n1", "n2"]
    assert report.approximate == ()
    torch.testing.assert_close(model(text), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("calibration", [[], [{"x": torch.full((2, 5, 8), float("nan"), dtype=torch.float64)}]])
def test_no_numbers_give_no_bound(calibration):
    model = Fused().double()
    with pytest.raises(Refusal, match="did not run n2, or gave it no numbers"):
        cancel(model, inputs={"x": _x(0, 1.0)}, approximate=1e-2, calibration=calibration)
    assert type(model.n1) is nn.RMSNorm
    assert not model.n1._forward_pre_hooks
