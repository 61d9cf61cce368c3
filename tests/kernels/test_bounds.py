from __future__ import annotations

import torch

from flashnorm.kernels.bounds import exceeds, expected_rms_linear
from flashnorm.kernels.reference import rms_linear
from tests.kernels import cases


def _operands():
    made = cases.case(8, 512, 64, torch.bfloat16)
    return made.x, made.weight


def test_a_right_result_is_within():
    x, weight = _operands()
    assert exceeds(rms_linear(x, weight, cases.EPS), expected_rms_linear(x, weight, cases.EPS)) <= 1


def test_a_rounded_norm_is_only_within_its_own_bound():
    x, weight = _operands()
    rounded = (torch.nn.functional.rms_norm(x, (512,), None, cases.EPS) @ weight.t()).to(x.dtype)
    assert exceeds(rounded, expected_rms_linear(x, weight, cases.EPS, rounds_input=True)) <= 1
    assert exceeds(rounded, expected_rms_linear(x, weight, cases.EPS)) > 1


def test_a_dropped_product_is_caught():
    x, weight = _operands()
    expected = expected_rms_linear(x, weight, cases.EPS)
    kept = x.clone()
    kept[:, 100] = 0
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + cases.EPS)
    wrong = ((kept.float() @ weight.float().t()) * scale).to(x.dtype)
    assert exceeds(wrong, expected) > 1


def test_a_missing_value_is_caught():
    x, weight = _operands()
    out = rms_linear(x, weight, cases.EPS)
    out[3, 4] = float("nan")
    assert exceeds(out, expected_rms_linear(x, weight, cases.EPS)) == float("inf")
