from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.sites import probe_cache
from flashnorm.sites.probe_cache import ProbeCache
from tests.sites.test_probing import Norm

WIDTH = 24
CALL = ((torch.randn(2, WIDTH),), {})


def test_layers_with_different_settings_are_told_apart():
    cache = ProbeCache()
    assert cache.probe(Norm(eps=1e-5), *CALL).convention.eps == pytest.approx(1e-5, rel=1e-3)
    assert cache.probe(Norm(eps=1e-3), *CALL).convention.eps == pytest.approx(1e-3, rel=1e-3)


class Private(nn.Module):
    """A norm whose offset hides where a cache might not look."""

    def __init__(self, **settings):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        vars(self).update(settings)

    def offset(self):
        held = vars(self)
        return (
            held.get("_plus", 0.0)
            + held.get("pair", (0.0, 0.0))[1]
            + getattr(held.get("config"), "plus", 0.0)
            + getattr(held.get("number"), "plus", 0.0)
        )

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (self.offset() + self.weight)


class Config:
    def __init__(self, plus):
        self.plus = plus

    def __repr__(self):
        return "Config"


class Number(int):
    """One that prints like any other, and carries something along."""


def number(plus):
    made = Number(3)
    made.plus = plus
    return made


HIDDEN = {
    "private": lambda v: {"_plus": v},
    "pair": lambda v: {"pair": (1, v)},
    "config": lambda v: {"config": Config(v)},
    "subclass": lambda v: {"number": number(v)},
}


@pytest.mark.parametrize("settings", HIDDEN.values(), ids=HIDDEN)
def test_settings_are_told_apart_wherever_they_are_kept(settings):
    cache = ProbeCache()
    assert [cache.probe(Private(**settings(value)), *CALL).convention.offset for value in (0.0, 1.0)] == [0.0, 1.0]


def made_by_a_function(plus):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (plus + self.weight)

    return Made


def test_classes_of_one_name_are_told_apart():
    cache, classes = ProbeCache(), [made_by_a_function(plus) for plus in (0.0, 1.0)]
    assert len({made.__qualname__ for made in classes}) == 1
    assert [cache.probe(made(), *CALL).convention.offset for made in classes] == [0.0, 1.0]


class Asked(Private):
    """A norm whose offset is an argument of the call."""

    def forward(self, x, plus):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (float(plus) + self.weight)


class Amount:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value

    def __repr__(self):
        return "Amount"


@pytest.mark.parametrize("kind", [float, Amount])
def test_calls_with_different_arguments_are_told_apart(kind):
    cache, x = ProbeCache(), torch.randn(2, WIDTH)
    assert [cache.probe(Asked(), (x, kind(plus)), {}).convention.offset for plus in (0.0, 1.0)] == [0.0, 1.0]


def test_equal_norms_need_one_experiment(monkeypatch):
    runs = []
    monkeypatch.setattr(probe_cache, "probe", lambda module, *_: runs.append(module))
    cache, made = ProbeCache(), made_by_a_function(0.0)
    for module in (Norm(), Norm(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), made(), made()):
        cache.probe(module, *CALL)
    assert len(runs) == 3
