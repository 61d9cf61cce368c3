from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import pytest
import torch

from flashnorm.kernels import dispatch
from flashnorm.kernels.configs import (
    DeferredGemm,
    Fused,
    Gemv,
    NormLinear,
    Reference,
    Skinny,
    SplitK,
    Streamed,
    TmaGemm,
    from_dict,
    to_dict,
)
from flashnorm.kernels.dispatch import Problem, fits

HOPPER = dispatch._shipped((9, 0))
PLAIN = Problem(m=1, k=1000, n=1000, dtype=torch.bfloat16, gained=False, addressable=True, hopper=True)


def _choose(**changes):
    return dispatch._choose(replace(PLAIN, **changes), HOPPER)


def test_off_cuda_the_reference_runs():
    assert dispatch.choose(PLAIN, torch.device("cpu")) == Reference()


@pytest.mark.parametrize(("m", "family"), [(1, Gemv), (2, SplitK), (64, SplitK), (65, NormLinear), (4096, TmaGemm)])
def test_shapes_that_are_not_listed(m, family):
    assert isinstance(_choose(m=m), family)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_kernels_are_chosen_where_they_run(monkeypatch, dtype):
    x, weight, out = (torch.zeros(shape, dtype=dtype) for shape in ((4096, 512), (2048, 512), (4096, 2048)))
    for runs, family in ((True, TmaGemm), (False, NormLinear)):
        monkeypatch.setattr(dispatch, "cuda_runs", lambda device, runs=runs: runs)
        assert isinstance(dispatch._choose(dispatch.problem_of(x, weight, None, out), {}), family)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"m": 1}, None),
        ({"m": 2}, Skinny(32, 4, 12)),
        ({"m": 32}, Skinny(32, 4, 6)),
        ({"m": 33}, None),
        ({"m": 32, "n": 128256}, Skinny(64, 1, 4)),
        ({"m": 8, "gated": True}, Skinny(128, 1, 12)),
        ({"m": 9, "gated": True}, None),
        ({"m": 8, "addressable": False}, None),
        ({"m": 8, "hopper": False}, None),
    ],
)
def test_how_few_rows_end_a_block(changes, config):
    assert dispatch.skinny_for(replace(PLAIN, **changes)) == config


def test_few_outputs_and_other_gpus_keep_to_the_plain_sequence():
    assert isinstance(_choose(m=4096, n=64), NormLinear)
    assert isinstance(_choose(m=4096, hopper=False), NormLinear)


@pytest.mark.parametrize("m", [1, 2, 16, 17, 64, 65, 256, 1024, 4096, 9000])
@pytest.mark.parametrize(("k", "n"), [(576, 960), (4096, 6144), (77, 33)])
@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize("addressable", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_choice_can_always_run(m, k, n, gained, addressable, dtype, gated, hopper):
    problem = Problem(m, k, n, dtype, gained, addressable, gated, hopper)
    assert fits(dispatch._choose(problem, HOPPER), problem)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (Gemv(), {"m": 9}),
        (SplitK(), {"m": 65}),
        (SplitK(), {"addressable": False}),
        (SplitK(), {"gained": True}),
        (SplitK(), {"dtype": torch.float32}),
        (DeferredGemm(), {"addressable": False}),
        (DeferredGemm(), {"gained": True}),
        (DeferredGemm(), {"dtype": torch.float32}),
        (Fused(), {"gained": True}),
        (TmaGemm(), {"hopper": False}),
        (TmaGemm(), {"addressable": False}),
        (TmaGemm(), {"gained": True}),
        (TmaGemm(block_n=24), {"gated": True}),
        (Streamed(), {"hopper": False}),
        (Streamed(), {"m": 2}),
        (Streamed(), {"k": 1001}),
        (Gemv(), {"gated": True}),
        (SplitK(), {"gated": True}),
        (Skinny(), {"hopper": False}),
        (Skinny(), {"gained": True}),
        (Skinny(), {"m": 65}),
        (Skinny(128, 1, 12), {"m": 20}),  # its shared memory
    ],
)
def test_what_a_family_cannot_run(config, changes):
    assert fits(config, PLAIN)
    assert not fits(config, replace(PLAIN, **changes))


def test_rows_between_two_listed_take_the_larger():
    assert _choose(k=4096, n=6144, m=17) == HOPPER[4096, 6144, False][64]
    assert _choose(k=4096, n=6144, m=8192) == HOPPER[4096, 6144, False][4096]


def test_the_table_is_what_the_kernels_read():
    text = resources.files("flashnorm.kernels").joinpath("tables", "hopper.json").read_text(encoding="utf-8")
    entries = json.loads(text)["entries"]
    assert len(entries) == sum(map(len, HOPPER.values()))
    for entry in entries:
        chosen = _choose(m=entry["m"], k=entry["k"], n=entry["n"], gated=entry["gated"])
        assert to_dict(chosen) == entry["config"]


def test_an_unknown_parameter_is_refused():
    with pytest.raises(TypeError):
        from_dict({"family": "gemv", "block_q": 3})
