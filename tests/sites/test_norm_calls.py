"""Norms with hooks, and norms that are called in several ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from flashnorm.sites.audit import audit
from flashnorm.sites.inputs import Run
from flashnorm.sites.scalars import trace_scalars
from flashnorm.sites.tracing import Follower, trace
from tests.sites.small import OUT, TOKENS, WIDTH, after_fold, settled

X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """x -> norm -> linear, with something done to the norm after the model is built."""

    def __init__(self, change=lambda model: None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.RMSNorm(WIDTH, eps=1e-6)
        self.linear, self.shift = nn.Linear(WIDTH, OUT), nn.Parameter(torch.rand(WIDTH))
        settled(self)
        change(self)

    def forward(self, x):
        return self.linear(self.norm(x))


def kinds(model):
    """The kinds of blockers of the norm `norm`."""
    site = next(site for site in audit(model, inputs={"x": X}).sites if site.norm == "norm")
    return [blocker.kind for blocker in site.blockers]


def hook(function):
    return lambda model: model.norm.register_forward_hook(function)


HARMFUL = {
    "adds": (hook(lambda norm, args, out: out + 0.1), "residual-add"),
    "adds in place": (hook(lambda norm, args, out: out.add_(args[0])), "residual-add"),
    "bends": (hook(lambda norm, args, out: out.relu()), "non-linear"),
    "with keywords": (
        lambda model: model.norm.register_forward_hook(lambda n, a, k, out: out.abs(), with_kwargs=True),
        "non-linear",
    ),
    "before it": (lambda model: model.norm.register_forward_pre_hook(_doubles_weight), "shared"),
    "replaces the weight": (lambda model: model.norm.register_forward_pre_hook(_replaces_weight), "irregular"),
}


def _doubles_weight(norm, args):
    norm.weight.data.mul_(2).clamp_(max=3.0)


def _replaces_weight(norm, args):
    norm.weight.data = norm.weight.data.abs()


@pytest.mark.parametrize(("change", "kind"), HARMFUL.values(), ids=HARMFUL)
def test_what_a_hook_does_to_a_norm_is_seen(change, kind):
    assert kind in kinds(Plain(change))


HARMLESS = {
    "no hook": lambda model: None,
    "scales": hook(lambda norm, args, out: out * 3.0),
    "only looks": hook(lambda norm, args, out: setattr(norm, "seen", out)),
    "changes the input": lambda model: model.norm.register_forward_pre_hook(lambda norm, args: (args[0] + 1,)),
    "on another module": lambda model: model.linear.register_forward_hook(lambda linear, args, out: out.relu()),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_a_hook_that_a_gain_passes_keeps_nothing_from_folding(change):
    report, error = after_fold(Plain(change))
    assert report.folded == ["norm"]
    assert error < 1e-5


def test_another_norm_in_a_pre_hook_is_seen():
    """The second norm's output enters the first one, which is not linear in it."""

    def change(model):
        model.norm, model.first = nn.LayerNorm(WIDTH), model.norm
        model.norm.before = [model.first]
        model.norm.register_forward_pre_hook(lambda norm, args: (norm.before[0](args[0]),))

    model = Plain(change)
    reasons = audit(model, inputs={"x": X}).skipped
    assert "read by another norm" in reasons["first"]
    assert "norm" not in reasons


@pytest.mark.parametrize(
    "use", [lambda model, x: x @ model.linear.weight.t(), lambda model, x: F.linear(x, model.linear.weight)]
)
def test_a_hook_that_holds_the_live_model_uses_its_weights(use):
    """The audit runs a copy of the model, and cannot copy what a function closes over."""
    uses = Plain(lambda model: model.linear.register_forward_hook(lambda m, args, out: out + use(model, X)))
    assert "shared" in kinds(uses)
    report, error = after_fold(uses, X)
    assert report.folded == []
    assert error == 0


def test_a_hook_on_a_part_of_a_norm_blocks_it():
    class Parted(nn.RMSNorm):
        def __init__(self):
            super().__init__(WIDTH, eps=1e-6)
            self.last = nn.Identity()

        def forward(self, x):
            return self.last(super().forward(x))

    assert kinds(Plain(norm=Parted())) == []
    hooked = Plain(lambda model: model.norm.last.register_forward_hook(lambda m, a, out: out + 1), Parted())
    assert kinds(hooked) == ["irregular"]


class Square(nn.Module):
    def forward(self, x):
        return x.square()


def test_a_parametrized_gain_is_not_folded():
    """Its weight is computed on the fly, so there is no stored gain to move."""
    model = Plain(lambda model: parametrize.register_parametrization(model.norm, "weight", Square()))
    report, error = after_fold(model)
    assert report.folded == []
    assert error == 0


class Asked(nn.RMSNorm):
    """One that adds one to its gain if asked to, and returns its input as well if asked for that."""

    def forward(self, x, plus=False, both=False):
        out = F.rms_norm(x, (WIDTH,), eps=1e-6) * (self.weight + plus)
        return (out, x) if both else out


class Twice(Plain):
    def __init__(self, first: dict[str, bool], second: dict[str, bool]):
        super().__init__(norm=Asked(WIDTH))
        self.first, self.second = first, second

    def forward(self, x):
        outputs = self.norm(x, **self.first), self.norm(x[:, :2], **self.second)
        return [self.linear(out[0] if isinstance(out, tuple) else out) for out in outputs]


@pytest.mark.parametrize("other", ["plus", "both"])
def test_a_norm_that_is_called_in_another_way_is_tried_again(other):
    assert kinds(Twice({}, {other: False})) == []
    assert "irregular" in kinds(Twice({}, {other: True}))
    assert "irregular" in kinds(Twice({other: True}, {}))


class Alternating(nn.RMSNorm):
    """Adds one to its gain at every second call."""

    def __init__(self, period=2):
        super().__init__(WIDTH, eps=1e-6)
        self.calls, self.period = 0, period

    def forward(self, x):
        self.calls += 1
        plus = float(self.calls % self.period == 0)
        return F.rms_norm(x, (WIDTH,), eps=1e-6) * (self.weight + plus)


class ByPosition(nn.RMSNorm):
    """Adds one to its gain from the third position on."""

    def forward(self, x):
        plus = (torch.arange(x.shape[-2]) > 1).to(x.dtype)[:, None]
        return F.rms_norm(x, (WIDTH,), eps=1e-6) * (self.weight + plus)


def test_a_norm_that_changes_blocks():
    assert kinds(Plain(norm=Alternating())) == ["irregular"]
    assert kinds(Plain(norm=ByPosition(WIDTH, eps=1e-6))) == ["irregular"]


def test_norms_of_one_factory_are_told_apart():
    def norm(plus):
        class Made(nn.RMSNorm):
            def forward(self, x):
                return F.rms_norm(x, (WIDTH,), eps=1e-6) * (self.weight + plus)

        return Made(WIDTH, eps=1e-6)

    model = nn.Sequential(norm(0.0), nn.Linear(WIDTH, WIDTH), norm(1.0), nn.Linear(WIDTH, WIDTH))
    sites = audit(model, inputs={"input": X}).sites
    assert [site.convention.offset for site in sites] == [0.0, 1.0]


@pytest.mark.parametrize(
    "follow", [trace, lambda model, runs: trace_scalars(model, tuple(runs))], ids=["gains", "scalars"]
)
def test_what_the_watching_itself_computes_is_no_act_of_the_model(follow, monkeypatch):
    """Its work with codes would be followed in its turn, at a multiple of the time."""
    names = []
    execute = Follower._execute
    monkeypatch.setattr(
        Follower, "_execute", lambda self, func, *rest: (names.append(str(func)), execute(self, func, *rest))[1]
    )
    follow(Plain(), (Run({"x": X}),))
    assert "aten.mean.dim" in names or "aten._fused_rms_norm.default" in names  # the norm's own
    assert not {name for name in names if name.startswith(("aten.arange", "aten.bitwise", "aten.copy_", "aten.zeros"))}
