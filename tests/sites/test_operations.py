"""Operations with a variant that does more than move or add: each must keep its fold right, gain and bias alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites.hollow import REAL_LIMIT
from flashnorm.sites.transforms import audit_fully
from tests.sites.small import OUT, TOKENS, WIDTH, after_fold, settled


class Model(nn.Module):
    """norm -> `do` -> linear with a bias, so that a LayerNorm's bias would move where it can."""

    def __init__(self, kind, do):
        super().__init__()
        self.norm, self.linear, self.do = kind(WIDTH, eps=1e-6), nn.Linear(WIDTH, OUT), do
        settled(self)

    def forward(self, x):
        return self.do(self.norm(x), self.linear)


def rows(t):
    return torch.arange(TOKENS)[None, :, None].expand(t.shape)


# What is done, and whether the gain gets through. The bias may move only where the linear sees just the norm's output.
CASES = {
    "nothing": (lambda t, f: f(t), True, True),
    "scatter": (lambda t, f: f(torch.zeros_like(t).scatter(1, rows(t), t)), True, True),
    "scatter that adds": (lambda t, f: f(torch.zeros_like(t).scatter(1, rows(t), t, reduce="add")), False, False),
    "scatter that multiplies": (
        lambda t, f: f(torch.ones_like(t).scatter(1, rows(t), t, reduce="multiply")), False, False,
    ),
    "scatter of a number that adds": (lambda t, f: f(t.scatter(1, rows(t), 1.0, reduce="add")), False, False),
    "scatter_reduce": (lambda t, f: f(t.scatter_reduce(1, rows(t), t, "amax")), False, False),
    "sum with a factor": (lambda t, f: f(torch.add(torch.zeros_like(t), t, alpha=2)), True, False),
    "difference from zero": (lambda t, f: f(torch.zeros_like(t) - t), True, False),
    "difference from the number zero": (lambda t, f: f(0 - t), True, False),
    "interpolation from zero": (lambda t, f: f(torch.lerp(torch.zeros_like(t), t, 0.5)), True, False),
    "sum at a repeated index": (
        lambda t, f: f(torch.zeros_like(t).index_add(1, torch.tensor([0, 0, 1, 2, 3]), t)[:, :4]), True, False,
    ),
    "sum at repeated places": (
        lambda t, f: f(torch.zeros_like(t).scatter_add(1, rows(t) // 2, t)[:, :3]), True, False,
    ),
    "accumulating index_put": (
        lambda t, f: f(torch.zeros_like(t[0]).index_put((torch.tensor([0, 0]),), t[0, :2], accumulate=True)[:1]),
        True, False,
    ),
    "product with a factor": (lambda t, f: torch.addmm(f.bias, t[0], f.weight.T, alpha=2), True, False),
    "bias with a factor": (lambda t, f: torch.addmm(f.bias, t[0], f.weight.T, beta=3), True, False),
    "first channels only": (lambda t, f: torch.nn.functional.linear(t[..., :3], f.weight[:3, :3]), True, False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_the_fold_is_right(name, kind):
    do, folds, shifts = CASES[name]
    model = Model(kind, do)
    report, error = after_fold(model)
    assert error < 1e-5
    assert report.folded == (["norm"] if folds else []), report.skipped
    if folds and kind is nn.LayerNorm:
        assert bool((model.norm.bias == 0).all()) is shifts


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_a_reader_of_the_first_channels_alone(kind):
    """Its channels count from zero like those of the identity map, but there are fewer."""
    model = Model(kind, lambda t, f: f(t[..., : WIDTH // 2]))
    model.linear = nn.Linear(WIDTH // 2, OUT)
    report, error = after_fold(model)
    assert report.folded == ["norm"]
    assert error < 1e-5


# Where an index or a mask is hollow, PyTorch returns memory that no one has written, or raises: the shadow of what is
# moved by it is not known, and must not be read off such memory.
UNKNOWN = {
    "picked": lambda t, places: t[:, places],
    "gathered": lambda t, places: t.gather(1, places.long()[None, :, None].expand(t.shape)),
    "scattered": lambda t, places: torch.zeros_like(t).scatter(1, places.long()[None, :, None].expand(t.shape), t),
    "put": lambda t, places: torch.zeros_like(t).index_put((torch.arange(2)[:, None], places[None]), t),
    "added at": lambda t, places: torch.zeros_like(t).index_add(1, places, t),
    "accumulated at": lambda t, places: torch.zeros_like(t).index_put(
        (torch.arange(2)[:, None], places[None]), t, accumulate=True
    ),
    "masked": lambda t, places: t.masked_fill((places == 0)[None, :, None], 0.0),
    "chosen": lambda t, places: torch.where((places == 0)[None, :, None], t, 0.0),
}


@pytest.mark.parametrize("how", UNKNOWN)
def test_what_a_hollow_index_or_mask_moves_is_not_followed(how):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, OUT, bias=False)
            self.register_buffer("table", torch.zeros(REAL_LIMIT + 1, dtype=torch.int32))

        def forward(self, x):
            return self.linear(UNKNOWN[how](self.norm(self.embed(x)), self.table[:TOKENS]))

    found = audit_fully(Routed(), inputs={"x": torch.randn(2, TOKENS, WIDTH)})
    (site,) = found.report.sites
    assert [blocker.kind for blocker in site.blockers] == ["unknown-places"]
    assert found.transforms["norm"].cancel.word == "no"
