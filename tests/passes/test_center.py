"""Centering: what it leaves unchanged, what it refuses and why, and that the checks would see a fault."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import flashnorm
from flashnorm.errors import Refusal
from flashnorm.passes.center import apply_center, center
from flashnorm.passes.centered_norm import CenteredNorm
from flashnorm.sites.audit import audit
from flashnorm.sites.centering import audit_centering

VOCABULARY, TOKENS = 11, 5


class PlainLayerNorm(nn.Module):
    """LayerNorm as model code writes it out, with gain 1 + w."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def bare(width, eps):
    return nn.LayerNorm(width, eps=eps, elementwise_affine=False)


def no_bias(width, eps):
    return nn.LayerNorm(width, eps=eps, bias=False)


KINDS = {"layer": nn.LayerNorm, "no bias": no_bias, "bare": bare, "one-plus": PlainLayerNorm}


class Block(nn.Module):
    """Pre-LN; a sublayer adds to the stream, in the way that `adds` says."""

    def __init__(self, kind="layer", width=8, eps=1e-5, bias=True, adds="plain", parallel=False):
        super().__init__()
        self.adds, self.parallel = adds, parallel
        self.n1, self.n2 = KINDS[kind](width, eps=eps), KINDS[kind](width, eps=eps)
        self.a, self.b = nn.Linear(width, 2 * width, bias=bias), nn.Linear(width, 2 * width, bias=bias)
        self.a_out, self.b_out = nn.Linear(2 * width, width, bias=bias), nn.Linear(2 * width, width, bias=bias)
        self.own = nn.Parameter(torch.zeros(width))

    def added(self, x, y):
        if self.adds == "scaled":
            return 0.5 * x + y / 3
        if self.adds == "token-scaled":
            return x * torch.sigmoid(torch.arange(x.shape[1]))[:, None].to(x) + y
        if self.adds == "indexed":
            index = torch.arange(x.shape[0] * x.shape[1]).flip(0)
            flat = x.flatten(0, 1)
            return flat.index_add(0, index, y.flatten(0, 1)[index]).view_as(x)
        if self.adds == "parameter":
            return x + y + self.own
        return x + y

    def forward(self, x):
        h = torch.tanh(self.a(self.n1(x)))
        if self.parallel:
            return self.added(self.added(x, self.a_out(h)), self.b_out(torch.tanh(self.b(self.n2(x)))))
        x = self.added(x, self.a_out(h))
        return self.added(x, self.b_out(torch.tanh(self.b(self.n2(x)))))


class Model(nn.Module):
    def __init__(self, tied=False, head_bias=True, layers=2, **block):
        super().__init__()
        self.width = width = block.get("width", 8)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Block(**block) for _ in range(layers))
        self.norm = KINDS[block.get("kind", "layer")](width, eps=block.get("eps", 1e-5))
        self.head = nn.Linear(width, VOCABULARY, bias=head_bias)
        if tied:
            self.head.weight = self.tokens.weight
        drawn(self)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def drawn(model):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.5, generator=generator)
    return model.eval()


def ids():
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def after_center(model, scale=1.0, **options):
    """The report, and the largest change of the output relative to the largest output, in fp64."""
    model = model.double()
    model.tokens.weight.mul_(scale)
    model.positions.weight.mul_(scale)
    before = model(ids())
    report = center(model, inputs={"ids": ids()}, **options)
    return report, float((model(ids()) - before).abs().max() / before.abs().max())


NORMS = ["layers.0.n1", "layers.0.n2", "layers.1.n1", "layers.1.n2", "norm"]


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    width=st.sampled_from([8, 24]),
    eps=st.sampled_from([1e-12, 1e-5, 1e-2]),
    bias=st.booleans(),
    adds=st.sampled_from(["plain", "scaled", "token-scaled", "indexed", "parameter"]),
    parallel=st.booleans(),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_the_output_stays_for_every_kind_of_norm_and_stream(kind, width, eps, bias, adds, parallel, scale):
    model = Model(layers=1, kind=kind, width=width, eps=eps, bias=bias, adds=adds, parallel=parallel, head_bias=bias)
    report, error = after_center(model, scale)
    norms = ["layers.0.n1", "layers.0.n2", "norm"]
    assert report.centered == norms
    assert set(report.keeps_bias) == (set(norms) if kind == "layer" and not bias else set())
    # Sums of at most 48 products, five in a row: some hundred roundings of 2^-53 = 1.1e-16, amplified where a mean is
    # subtracted from values near it.
    assert error < 1e-12
    assert all(isinstance(model.get_submodule(norm), CenteredNorm) for norm in norms)


def test_the_norms_are_rmsnorms_then_and_fold():
    model = Model().double()
    before = model(ids())
    center(model, inputs={"ids": ids()})
    report = audit(model, inputs={"ids": ids()})
    assert {site.convention.name for site in report.sites} == {"RMSNorm w"}
    assert {site.convention.eps for site in report.sites} == {1e-5}
    assert len(flashnorm.fold(model, inputs={"ids": ids()}).folded) == 5
    torch.testing.assert_close(model(ids()), before, rtol=1e-11, atol=1e-11)


def test_what_is_written_has_no_mean():
    model = Model(adds="parameter").double()
    center(model, inputs={"ids": ids()})
    stream = model.tokens(ids()) + model.positions(torch.arange(TOKENS))
    assert model.layers[0](stream).mean(-1).abs().max() < 1e-14


def test_done_twice_it_changes_nothing_more():
    model = Model().double()
    center(model, inputs={"ids": ids()})
    once = copy.deepcopy(model.state_dict())
    report = center(model, inputs={"ids": ids()})
    assert report.centered == []
    assert set(report.skipped.values()) == {"it subtracts no mean"}
    assert all(torch.equal(value, once[name]) for name, value in model.state_dict().items())


def test_a_bias_without_a_next_one_stays():
    report, error = after_center(Model(head_bias=False))
    assert list(report.keeps_bias) == ["norm"]
    assert report.keeps_bias["norm"] == "head.weight, which reads it, has no bias that could take it"
    assert error < 1e-12


def test_single_tokens_without_an_axis_for_them():
    class Single(Model):
        def forward(self, ids):
            return self.head(self.norm(self.tokens(ids[0, 0])))

    report, error = after_center(Single())
    assert report.centered == ["norm"]
    assert error < 1e-12


def test_the_norm_of_single_heads_centers_the_channels_of_each():
    class Heads(Model):
        """Queries are normalised for each of two heads; the rest of what the same linear writes is not."""

        def __init__(self):
            super().__init__()
            self.qv = nn.Linear(8, 24)
            self.nq = nn.LayerNorm(8)
            drawn(self)

        def forward(self, ids):
            y = self.qv(self.norm(self.tokens(ids)))
            q = self.nq(y[..., :16].unflatten(-1, (2, 8)))
            return torch.tanh(y[..., 16:]) + torch.tanh(q).sum(-2)

    model = Heads()
    weight = model.qv.weight.detach().double().clone()
    report, error = after_center(model)
    assert report.centered == ["norm", "nq"]
    assert error < 1e-12
    assert torch.equal(model.qv.weight[16:], weight[16:])
    assert model.qv.weight[:16].unflatten(0, (2, 8)).mean(1).abs().max() < 1e-15


class TestRefusals:
    """Each with its reason, and each really needed: forced, it changes the output."""

    def refused(self, model, words, norm="norm"):
        model = model.double()
        report = audit_centering(model, inputs={"ids": ids()})
        (found,) = [c for c in report.centerings if c.norm == norm]
        assert not found.centerable
        assert words in found.reason
        with torch.no_grad():
            before = model(ids())
            apply_center(model, [found], report)
            assert (model(ids()) - before).abs().max() > 1e-3 * before.abs().max()

    def test_a_tied_head(self):
        self.refused(Model(tied=True), "tokens.weight, which writes into it, cannot be centered: it is also used")

    def test_a_norm_in_the_stream(self):
        class PostNorm(Model):
            def forward(self, ids):
                x = self.layers[0].n1(self.tokens(ids))
                return self.head(self.norm(x + self.layers[0].a_out(torch.tanh(self.layers[0].a(x)))))

        self.refused(PostNorm(), "the output of layers.0.n1 is added to it, which has a mean by its gain and bias")

    def test_something_that_no_weight_writes(self):
        class Sines(Model):
            def forward(self, ids):
                return self.head(self.norm(self.tokens(ids) + torch.sin(torch.arange(8)).to(self.tokens.weight)))

        self.refused(Sines(), "something that no linear layer or embedding wrote is added to it")

    def test_a_scale_for_each_channel(self):
        class Scaled(Model):
            def forward(self, ids):
                return self.head(self.norm(self.tokens(ids) * self.layers[0].own))

        self.refused(Scaled(), "it reads something that no linear layer or embedding wrote")

    def test_another_reader_of_the_stream(self):
        class Read(Model):
            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(x)) + torch.tanh(x).sum(-1, keepdim=True)

        self.refused(Read(), "cannot be centered: the operation tanh reads it")

    def test_a_linear_layer_that_reads_the_stream(self):
        class Read(Model):
            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(x)) + self.head(x)

        self.refused(Read(), "cannot be centered: a linear layer or another product reads it")

    def test_a_norm_that_subtracts_no_mean_beside_it(self):
        class Both(Model):
            def __init__(self):
                super().__init__()
                self.rms = nn.RMSNorm(8, eps=1e-5)

            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(x)) + self.head(self.rms(x))

        self.refused(Both(), "cannot be centered: a norm that subtracts no mean reads it")

    def test_halves_of_different_sums(self):
        class Halves(Model):
            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(torch.cat([x[..., :4], 2 * x[..., 4:]], -1)))

        self.refused(Halves(), "a LayerNorm reads it together with other things, not as one sum")

    def test_a_part_of_a_sum(self):
        class Part(Model):
            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(torch.cat([x[..., :4], x[..., :4]], -1)))

        self.refused(Part(), "channels of it that do not lie together")

    def test_norms_of_different_parts(self):
        class Parts(Model):
            def __init__(self):
                super().__init__()
                self.tokens, self.norm = nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16)
                self.head, self.part = nn.Linear(16, VOCABULARY), nn.LayerNorm(8)
                drawn(self)

            def forward(self, ids):
                x = self.tokens(ids)
                return self.head(self.norm(x)) + self.part(x[..., :8]).square().sum(-1, keepdim=True)

        self.refused(Parts(), "norms read different parts of it", norm="part")


def test_a_writer_that_the_run_did_not_reach_is_a_reason():
    class Branch(Model):
        def forward(self, ids):
            x = self.tokens(ids)
            layer = self.layers[0]
            x = x + layer.a_out(torch.tanh(layer.a(layer.n1(x))))
            return self.head(self.norm(x if ids.shape[1] < 9 else x + layer.b_out(torch.tanh(layer.b(x)))))

    report = audit_centering(Branch(), inputs={"ids": ids()})
    verdicts = {c.norm: c for c in report.centerings}
    assert verdicts["layers.0.n1"].centerable
    assert "layers.0.b.weight was not reached by the trace" in verdicts["norm"].reason


class TestNegativeControls:
    """The comparison sees a writer that was forgotten, and one that was centered along the wrong axis."""

    def broken(self, change):
        model = Model().double()
        report = audit_centering(model, inputs={"ids": ids()})
        with torch.no_grad():
            before = model(ids())
            apply_center(model, [change(c) for c in report.centerings], report)
            return float((model(ids()) - before).abs().max() / before.abs().max())

    def test_nothing_broken(self):
        assert self.broken(lambda c: c) < 1e-12

    def test_a_writer_forgotten(self):
        def without_positions(c):
            return replace(c, writers=tuple(w for w in c.writers if w.parameter != "positions.weight"))

        assert self.broken(without_positions) > 1e-3

    def test_a_bias_forgotten(self):
        def without_bias(c):
            return replace(c, writers=tuple(w for w in c.writers if w.parameter != "layers.0.a_out.bias"))

        assert self.broken(without_bias) > 1e-3

    def test_the_wrong_axis(self):
        def turned(c):
            wrong = (replace(w, axis=1) if w.parameter == "layers.0.a_out.weight" else w for w in c.writers)
            return replace(c, writers=tuple(wrong))

        assert self.broken(turned) > 1e-3


def test_an_untied_head_keeps_its_values():
    model = Model(tied=True)
    report, error = after_center(model, untie=True)
    assert report.untied == {"head.weight": "tokens.weight"}
    assert report.centered == NORMS
    assert error < 1e-12


def test_a_norm_with_a_hook_is_refused_and_nothing_is_changed():
    model = Model(tied=True)
    before = copy.deepcopy(model.state_dict())
    model.norm.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(Refusal, match="norm has a forward hook"):
        center(model, inputs={"ids": ids()}, untie=True)
    assert model.head.weight is model.tokens.weight
    assert type(model.layers[0].n1) is nn.LayerNorm
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_narrow_dtype_the_output_stays_within_its_roundings(dtype):
    """Compared with the exact output of the model as it was: centering rounds each weight once more, and no worse."""
    model = Model(layers=1).to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids())
        before = (model(ids()).double() - exact).norm() / exact.norm()
        center(model, inputs={"ids": ids()})
        after = (model(ids()).double() - exact).norm() / exact.norm()
    # Ten weights and activations in a row, each rounded by half a unit at worst, and once more for each weight.
    assert max(before, after) < 10 * torch.finfo(dtype).eps
