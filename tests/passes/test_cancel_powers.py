"""Cancellation past what is homogeneous: ReLU and squared-ReLU MLPs, gated or not, between two norms."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flashnorm import algebra
from flashnorm.passes.approximate import epsilon_bounds
from flashnorm.passes.cancel import apply_cancel, cancel
from flashnorm.sites.cancelling import audit_cancellation
from tests import zoo
from tests.cancelling.examine import TOLERANCE, change, in_fp64, logits, with_small_embeddings
from tests.passes.test_cancel import KINDS, LATER, after_cancel, drawn, x
from tests.zoo.weights import randomise

# Activation -> the degree in which it is homogeneous.
ACTIVATIONS = {
    "relu": (F.relu, 1),
    "relu, written as a bound": (lambda t: t.clamp(min=0), 1),
    "leaky relu": (lambda t: F.leaky_relu(t, 0.1), 1),
    "relu squared": (lambda t: F.relu(t).square(), 2),
    "relu squared, as a product": (lambda t: F.relu(t) * F.relu(t), 2),
    "cube": (lambda t: t**3, 3),
}


class Mlp(nn.Module):
    """n1, up and perhaps gate, an activation, down, n2."""

    def __init__(self, act, gate="none", first="rms", later="rms", eps=(1e-5, 1e-6), width=8, bias=False):
        super().__init__()
        self.width, self.act, self.kind = width, act, gate
        self.n1, self.n2 = KINDS[first](width, eps=eps[0]), LATER[later](width, eps=eps[1])
        self.up = nn.Linear(width, 24 if gate == "fused" else 12, bias=bias)
        self.gate = nn.Linear(width, 12, bias=False) if gate == "apart" else None
        self.down = nn.Linear(12, width, bias=False)
        drawn(self)

    def forward(self, x):
        h = self.n1(x)
        if self.kind == "none":
            y = self.act(self.up(h))
        else:
            gate, up = self.up(h).chunk(2, -1) if self.gate is None else (self.gate(h), self.up(h))
            y = self.act(gate) * up
        return torch.tanh(self.n2(self.down(y)))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    act=st.sampled_from(sorted(ACTIVATIONS)),
    gate=st.sampled_from(["none", "apart", "fused"]),
    first=st.sampled_from(sorted(KINDS)),
    later=st.sampled_from(sorted(LATER)),
    eps=st.tuples(st.sampled_from([1e-12, 1e-6, 1e-2]), st.sampled_from([1e-8, 1e-6, 1e-2])),
    width=st.sampled_from([8, 15]),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 1e3]),
)
def test_the_scalar_goes_to_the_norm_behind_the_mlp(act, gate, first, later, eps, width, scale):
    function, degree = ACTIVATIONS[act]
    model = Mlp(function, gate, first, later, eps, width)
    report, error = after_cancel(model, scale)
    assert (report.full, report.partial) == (["n1"], {})
    assert model.n2.takes.degree == degree + (gate != "none")
    # Three products of at most 15 terms, powers up to the fourth of them and two norms: some hundred roundings of
    # 2^-53 = 1.1e-16, amplified where a LayerNorm subtracts a mean from values near it.
    assert error < 1e-12


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    degree=st.integers(1, 4),
    eps=st.tuples(st.sampled_from([1e-8, 1e-5, 1e-2]), st.sampled_from([1e-8, 1e-6, 1e-2])),
    scale=st.sampled_from([1e-4, 1.0, 1e2]),
)
def test_the_equation_of_the_carried_epsilon(degree, eps, scale):
    """n₂(f(n₁(x))) = n₂(f(x)) with the epsilon eps2 r₁^(2d), for f homogeneous of degree d."""
    rows = x(scale=scale)
    weight = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def f(t):
        return F.relu(t @ weight) ** degree

    want = algebra.rms_norm(f(algebra.rms_norm(rows, eps[0])), eps[1])
    got = algebra.rms_norm(f(rows), algebra.carried_epsilon(rows, *eps, degree))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * float(want.abs().max()))


def forced(model, norm="n1", change=lambda c: replace(c, kept=())):
    """By how much the output moves if the norm is dropped, whatever the verdict; and the verdict."""
    model, inputs = model.double(), x()
    audit = audit_cancellation(model, inputs={"x": inputs})
    (found,) = [c for c in audit.cancellations if c.norm == norm]
    with torch.no_grad():
        before = model(inputs)
        apply_cancel(model, [change(found)], audit)
        return found, float((model(inputs) - before).abs().max() / before.abs().max())


REFUSED = {
    "bounded on both sides": (lambda t: t.clamp(0, 0.5), "the operation clamp is not homogeneous"),
    "bounded below by another number": (lambda t: t.clamp(min=0.1), "the operation clamp is not homogeneous"),
    "a power that depends on the element": (
        lambda t: F.relu(t) ** torch.linspace(1.5, 2.5, t.shape[-1], dtype=t.dtype),
        "the operation pow is not homogeneous",
    ),
    "silu": (F.silu, "the operation silu is not homogeneous"),
    "two degrees added up": (lambda t: F.relu(t) + F.relu(t).square(), "does not carry the same scalar"),
    "tokens multiplied": (lambda t: F.relu(t) * t.roll(1, 1), "meets another tensor that carries a scalar"),
    "a constant added": (lambda t: F.relu(t) + 1.0, "does not carry the same scalar"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_homogeneous_is_refused_and_forced_changes_the_output(name):
    function, words = REFUSED[name]
    # The norm behind divides by whatever size its rows have, so with a small epsilon it hides a scalar of whole rows.
    found, moved = forced(Mlp(function, eps=(1e-5, 1.0)))
    assert found.verdict == "no"
    assert words in found.reason
    assert moved > 1e-3


def test_a_bias_of_the_up_projection_is_refused():
    found, moved = forced(Mlp(F.relu, bias=True))
    assert found.verdict == "no"
    assert "a bias is added" in found.reason
    assert moved > 1e-3


def test_no_norm_behind_the_mlp_is_refused():
    class Open(Mlp):
        def forward(self, x):
            return x + self.down(F.relu(self.up(self.n1(x))))

    found, moved = forced(Open(F.relu))
    assert found.verdict == "no"
    assert "added to what does not carry the same scalar" in found.reason
    assert moved > 1e-3


def test_a_relu_before_any_product_is_refused():
    """It would be right to drop this norm: the refusal keeps the verdict on deferring plain (`_unread`)."""

    class Early(Mlp):
        def forward(self, x):
            return torch.tanh(self.n2(self.down(F.relu(self.up(F.relu(self.n1(x)))))))

    found, _ = forced(Early(F.relu))
    assert found.verdict == "no"
    assert "relu comes before any product with a weight" in found.reason


def test_a_gate_that_is_not_homogeneous_keeps_the_scalar_alone():
    model = Mlp(F.silu, "apart")
    report, error = after_cancel(model, 1e-2)
    assert report.partial == {"n1": ("gate",)}
    assert model.n2.takes.degree == 1
    assert error < 1e-12


class TestNegativeControls:
    """The comparisons above see a wrong power."""

    @pytest.mark.parametrize("degree", [1, 2, 4])
    def test_another_degree(self, degree):
        def other(c):
            (absorber,) = c.absorbers
            assert absorber.degree == 3
            return replace(c, absorbers=(replace(absorber, degree=degree),))

        model = Mlp(ACTIVATIONS["relu squared"][0], "apart", eps=(1e-6, 1.0))
        assert forced(model, change=other)[1] > 1e-3

    def test_the_second_epsilon_left_as_it_was(self):
        model = Mlp(F.relu, eps=(1e-6, 1.0))
        assert forced(model, change=lambda c: replace(c, absorbers=()))[1] > 1e-3


@torch.no_grad()
def test_the_bound_without_the_epsilon_term_holds_for_a_power():
    model = Mlp(ACTIVATIONS["relu squared"][0], "apart", eps=(1e-6, 1e-4)).double()
    for weight in (model.up.weight, model.gate.weight, model.down.weight):
        weight.sub_(weight.mean())  # so that no token's gates are all closed
    # Rows of one RMS, below one, so that the bound is not far from what happens and the power matters most.
    texts = [algebra.rms_norm(x().roll(shift, -1), 0.0) * 0.5 for shift in range(3)]
    calibration = [{"x": text} for text in texts]
    audit = audit_cancellation(model, inputs={"x": texts[0]})
    chosen = audit.cancellations[0]
    (absorber,) = chosen.absorbers
    linear = replace(chosen, absorbers=(replace(absorber, degree=1),))
    wrong = epsilon_bounds(model, [linear], audit.probes, calibration)["n2"].bound
    rough = copy.deepcopy(model)
    report = cancel(rough, inputs={"x": texts[0]}, approximate=1e9, calibration=calibration)
    assert report.approximate == ("n2",)
    largest = 0.0
    for text in texts:
        want, got = (_input_of_tanh(m, text) for m in (model, rough))
        largest = max(largest, float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()))
    # Beside the bound, the roundings in which the two models differ.
    assert largest <= report.bounds["n2"].bound * (1 + 1e-9) + 1e-13
    assert largest > 2 * wrong, "the bound for another power would not have been seen to be too small"


def _input_of_tanh(model, x):
    """What the last norm of an `Mlp` returns."""
    found = []
    with model.n2.register_forward_hook(lambda module, args, output: found.append(output)):
        model(x)
    return found[0]


def _gemma2_with_relu() -> nn.Module:
    config = zoo.tiny_config("causal", "gemma2")
    config.hidden_activation = "relu"
    model = transformers.Gemma2ForCausalLM(config).eval()
    randomise(model, 0)
    return model


@pytest.mark.parametrize(
    ("build", "norm", "degree"),
    [
        (lambda: zoo.tiny_model("causal", "bitnet"), "post_attention_layernorm", 3),  # relu²(gate) ⊙ up, as released
        (_gemma2_with_relu, "pre_feedforward_layernorm", 2),  # sandwich norms, with another activation than released
    ],
)
@torch.no_grad()
def test_installed_architectures_lose_the_norm_before_the_mlp(build, norm, degree):
    model = build()
    audit = audit_cancellation(model)
    model, inputs = in_fp64(model)
    chosen = [c for c in audit.cancellations if c.norm.endswith(norm)]
    assert [c.verdict for c in chosen] == ["full"] * model.config.num_hidden_layers
    assert {a.degree for c in chosen for a in c.absorbers} == {degree}
    for plain in (model, with_small_embeddings(model)):
        before, cancelled = logits(plain, inputs), copy.deepcopy(plain)
        apply_cancel(cancelled, chosen, audit)
        assert change(before, logits(cancelled, inputs)) < TOLERANCE
        wrong = [replace(c, absorbers=tuple(replace(a, degree=1) for a in c.absorbers)) for c in chosen]
        apply_cancel(plain, wrong, audit)
        assert change(before, logits(plain, inputs)) > 1e2 * TOLERANCE
