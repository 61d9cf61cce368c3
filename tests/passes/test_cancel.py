"""Cancellation: what it leaves unchanged, what it refuses and why, and that the checks would see a fault."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashnorm.errors import Refusal
from flashnorm.passes.cancel import apply_cancel, cancel
from flashnorm.sites.cancelling import audit_cancellation

TOKENS = 5


class OnePlus(nn.Module):
    """RMSNorm with gain 1 + w."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class Weightless(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def layer_norm(width, eps):
    return nn.LayerNorm(width, eps=eps, bias=False)


KINDS = {"rms": nn.RMSNorm, "one-plus": OnePlus, "weightless": Weightless, "layer": layer_norm}
LATER = KINDS | {"layer with bias": nn.LayerNorm}


class Attention(nn.Module):
    """n1 feeds q and k, which are normalised per head, and v, which may be; then something of all three."""

    def __init__(self, first, later, heads=2, dim=4, eps=(1e-5, 1e-6), layout="heads last", norm_v=False, bias=False):
        super().__init__()
        self.width = width = heads * dim
        self.heads, self.layout = heads, layout
        self.n1 = KINDS[first](width, eps=eps[0])
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias and i == 1) for i in range(3))
        self.nq, self.nk = LATER[later](dim, eps=eps[1]), LATER[later](dim, eps=eps[1])
        self.nv = KINDS["rms"](dim, eps=eps[1]) if norm_v else nn.Identity()
        drawn(self)

    def split(self, y):
        y = y.unflatten(-1, (self.heads, -1))
        return y.transpose(1, 2) if self.layout == "heads first" else y

    def forward(self, x):
        h = self.n1(x)
        q, k, v = self.nq(self.split(self.q(h))), self.nk(self.split(self.k(h))), self.nv(self.split(self.v(h)))
        return torch.tanh(q) * torch.tanh(k) + torch.tanh(v)


class Fused(nn.Module):
    """One linear whose output is a latent, which is normalised, and a rest, which is not: latent attention."""

    def __init__(self, width=8, latent=6, rest=2, flat=False):
        super().__init__()
        self.sizes, self.flat = (latent, rest), flat
        self.n1, self.n2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(latent, eps=1e-6)
        self.down = nn.Linear(width, latent + rest, bias=False)
        drawn(self)

    def forward(self, x):
        latent, rest = self.down(self.n1(x)).split(self.sizes, -1)
        latent = self.n2(latent.flatten(0, 1)).view_as(latent) if self.flat else self.n2(latent)
        return torch.cat([torch.tanh(latent), torch.tanh(rest)], -1)


def drawn(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.6, 0.5, generator=generator)


def x(width=8, scale=1.0):
    return scale * torch.randn(2, TOKENS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def after_cancel(model, scale=1.0):
    """The report, and the largest change of the output relative to the largest output, in fp64."""
    model = model.double()
    inputs = x(getattr(model, "width", 8), scale)
    before = model(inputs)
    report = cancel(model, inputs={"x": inputs})
    return report, float((model(inputs) - before).abs().max() / before.abs().max())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    first=st.sampled_from(sorted(KINDS)),
    later=st.sampled_from(sorted(LATER)),
    shape=st.sampled_from([(2, 16), (4, 16), (1, 16)]),
    eps=st.tuples(st.sampled_from([1e-12, 1e-6, 1e-2]), st.sampled_from([1e-8, 1e-6, 1e-2])),
    layout=st.sampled_from(["heads last", "heads first"]),
    norm_v=st.booleans(),
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 1e3]),
)
def test_the_output_stays_for_every_kind_of_norm_epsilon_layout_and_scale(
    first, later, shape, eps, layout, norm_v, scale
):
    model = Attention(first, later, *shape, eps, layout, norm_v)
    report, error = after_cancel(model, scale)
    assert (report.full, report.partial) == ((["n1"], {}) if norm_v else ([], {"n1": ("v",)}))
    # Sums of at most 64 products, twice, and a division: some hundred roundings of 2^-53 = 1.1e-16, amplified where a
    # LayerNorm subtracts a mean from values near it.
    assert error < 1e-12


@pytest.mark.parametrize("scale", [1e-4, 1.0])
@pytest.mark.parametrize("flat", [False, True])
def test_channels_of_one_reader_that_no_norm_follows_keep_the_scalar(flat, scale):
    report, error = after_cancel(Fused(flat=flat), scale)
    assert report.partial == {"n1": ("down",)}
    assert error < 1e-12


class Chain(nn.Module):
    """Norms in a row, with a linear layer between each two."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.RMSNorm(8, eps=e) for e in (1e-5, 1e-6, 1e-4))
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        drawn(self)

    def forward(self, x):
        return torch.tanh(self.n3(self.b(self.n2(self.a(self.n1(x))))))


def test_norms_in_a_row_are_all_dropped_but_the_last():
    report, error = after_cancel(Chain(), 1e-4)
    assert report.full == ["n1", "n2"]
    assert error < 1e-12


class TestRefusals:
    """Each with its reason, and each really needed: forced, it changes the output."""

    def refused(self, model, words, norm="n1"):
        model = model.double()
        inputs = x()
        audit = audit_cancellation(model, inputs={"x": inputs})
        (found,) = [c for c in audit.cancellations if c.norm == norm]
        assert found.verdict == "no"
        assert words in found.reason
        with torch.no_grad():
            before = model(inputs)
            apply_cancel(model, [replace(found, kept=())], audit)
            assert (model(inputs) - before).abs().max() > 1e-3 * before.abs().max()

    def test_no_norm_follows(self):
        class Plain(Fused):
            def forward(self, x):
                return torch.tanh(self.down(self.n1(x)))

        self.refused(Plain(), "tanh is not homogeneous")

    def test_a_reader_that_is_no_linear_layer(self):
        class Laurel(Fused):
            def forward(self, x):
                return super().forward(x) + self.n1(x)

        self.refused(Laurel(), "before any linear layer, it is added to")

    def test_tokens_are_mixed_before_the_norm(self):
        class Mixed(Fused):
            def forward(self, x):
                return torch.tanh(self.n2(self.down(self.n1(x)).cumsum(1)[..., :6]))

        self.refused(Mixed(), "different tokens are combined")

    def test_a_bias_of_the_norm(self):
        model = Fused()
        model.n1 = nn.LayerNorm(8)
        drawn(model)
        self.refused(model, "it adds a bias")

    def test_a_norm_over_several_groups(self):
        class Groups(Fused):
            def forward(self, x):
                return torch.tanh(self.n2(self.down(self.n1(x))[..., :6].flatten(0, 1).T.reshape(-1, 6)))

        self.refused(Groups(), "rows do not each carry the scalar of one token")

    def test_a_norm_that_other_things_go_through_too(self):
        class Shared(Fused):
            def forward(self, x):
                return super().forward(x) + torch.tanh(torch.cat([self.n2(x[..., :6]), x[..., 6:]], -1))

        self.refused(Shared(), "n2, which it reaches, is also called with other things")


def test_a_bias_keeps_the_scalar_on_its_own_reader_alone():
    report, error = after_cancel(Attention("rms", "rms", norm_v=True, bias=True))
    assert report.partial == {"n1": ("k",)}
    assert error < 1e-12


def test_channels_that_the_run_did_not_use_keep_the_scalar():
    class Window(Fused):
        def forward(self, x):
            y = self.down(self.n1(x))
            out = torch.tanh(self.n2(y[..., :6]))
            return out if x.shape[1] < 8 else out + y[:, 7:8, 6:].sum(-1, keepdim=True)

    model = Window().double()
    longer = torch.cat([x(), x()], 1)
    with torch.no_grad():
        before = model(longer)
        assert cancel(model, inputs={"x": x()}).partial == {"n1": ("down",)}
        torch.testing.assert_close(model(longer), before, rtol=1e-12, atol=1e-12)


class TestNegativeControls:
    """The comparisons above see each of the three ways to get it wrong."""

    def broken(self, model, change, scale):
        model, inputs = model.double(), x(scale=scale)
        audit = audit_cancellation(model, inputs={"x": inputs})
        chosen = [c for c in audit.cancellations if c.verdict != "no"]
        with torch.no_grad():
            before = model(inputs)
            apply_cancel(model, [change(c) for c in chosen], audit)
            return float((model(inputs) - before).abs().max() / before.abs().max())

    def test_the_second_epsilon_left_as_it_was(self):
        def plain(c):
            return replace(c, absorbers=())

        assert self.broken(Attention("rms", "rms", norm_v=True), plain, scale=1e-4) > 1e-2

    def test_a_kept_reader_forgotten(self):
        assert self.broken(Fused(), lambda c: replace(c, kept=()), scale=1.0) > 1e-3

    def test_tokens_and_heads_exchanged(self):
        def turned(c):
            wrong = tuple(replace(a, arrangement=replace(a.arrangement, positions=(0, 2))) for a in c.absorbers)
            return replace(c, absorbers=wrong)

        model = Attention("rms", "rms", heads=TOKENS, dim=8, eps=(1e-8, 0.1), norm_v=True)
        model.n1, model.q, model.k, model.v = (
            nn.RMSNorm(8, eps=1e-8),
            *(nn.Linear(8, 8 * TOKENS, bias=False) for _ in range(3)),
        )
        drawn(model)
        assert self.broken(model, turned, scale=1.0) > 1e-3


def test_parameters_keep_their_names_and_values():
    model = Attention("rms", "layer with bias")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cancel(model, inputs={"x": x().float()})
    after = model.state_dict()
    assert list(after) == list(before) or set(after) == set(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_cancelled_model_can_be_copied_and_run_on_two_threads_at_once():
    model = Attention("rms", "rms", norm_v=True).double()
    want = model(x(scale=1e-3)), model(x(scale=1e-4))
    cancel(model, inputs={"x": x()})
    model = copy.deepcopy(model)
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def work(which):
        got[which] = [model(x(scale=(1e-3, 1e-4)[which])) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in (0, 1):
        assert len(got[which]) == 50
        for out in got[which]:
            torch.testing.assert_close(out, want[which], rtol=1e-12, atol=1e-12)


def test_a_norm_with_a_hook_is_refused_and_nothing_is_changed():
    model = Attention("rms", "rms", norm_v=True).double()
    model.nq.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(Refusal, match="nq has a forward hook"):
        cancel(model, inputs={"x": x()})
    assert type(model.n1) is nn.RMSNorm


def test_a_norm_that_the_model_holds_under_two_names_is_replaced_under_both():
    class Twice(Attention):
        def __init__(self):
            super().__init__("rms", "rms", norm_v=True)
            self.other = nn.ModuleDict({"n1": self.n1, "nq": self.nq})

        def forward(self, x):
            h = self.other["n1"](x)
            return torch.tanh(self.other["nq"](self.split(self.q(h)))) + torch.tanh(self.nk(self.split(self.k(h))))

    model = Twice()
    report, error = after_cancel(model, 1e-3)
    assert report.full == ["n1"]
    assert model.other["n1"] is model.n1
    assert model.other["nq"] is model.nq
    assert error < 1e-12


def test_an_epsilon_that_depends_on_the_dtype_is_refused_and_nothing_is_changed():
    model = Attention("rms", "rms", norm_v=True)
    model.nq = nn.RMSNorm(4)  # its epsilon is that of the dtype it runs in
    model = model.double()
    with pytest.raises(Refusal, match=r"nq computes something else in torch\.float64"):
        cancel(model, inputs={"x": x()})
    assert type(model.n1) is nn.RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_a_narrow_dtype_the_output_stays_within_its_roundings(dtype):
    model = Attention("rms", "rms", norm_v=True).to(dtype)
    inputs = x().to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(inputs.double())
        before = (model(inputs).double() - exact).norm() / exact.norm()
        cancel(model, inputs={"x": inputs})
        after = (model(inputs).double() - exact).norm() / exact.norm()
    # Both round after the norm, the product, the second norm and the activations: five roundings of half a unit each at
    # worst, which the norms' scale does not amplify; the products' outputs are of one scale.
    assert max(before, after) < 5 * torch.finfo(dtype).eps
