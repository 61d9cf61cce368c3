"""Values that leave PyTorch and come back as new tensors."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from flashnorm.sites.audit import audit
from tests.sites.small import OUT, WIDTH, after_fold, settled


class Model(nn.Module):
    """linear(norm(x)) + elsewhere(norm(x))"""

    def __init__(self, elsewhere):
        super().__init__()
        self.norm, self.linear, self.elsewhere = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, OUT), elsewhere
        settled(self)

    def forward(self, x):
        return self.linear(self.norm(x)) + self.elsewhere(self, self.norm(x), x)[..., :OUT]


def through_storage(t):
    return torch.frombuffer(bytearray(t.untyped_storage().tolist()), dtype=t.dtype).view(t.shape)


EXITS = {
    "numpy": lambda t: torch.from_numpy(t.numpy() * 1),
    "__array__": lambda t: torch.from_numpy(np.exp(np.asarray(t))),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "item": lambda t: torch.full(t.shape, t[0, 0, 0].item()),
    "__float__": lambda t: torch.full(t.shape, float(t[0, 0, 0])),
    "__dlpack__": lambda t: torch.from_numpy(np.from_dlpack(t).copy()),
    "tensor": lambda t: torch.tensor([t[0, 0, 0], t[0, 0, 1]]).repeat(4),
    "new_tensor": lambda t: t.new_tensor([[t[0, 0, 0]] * OUT]),
    "__deepcopy__": lambda t: copy.deepcopy(t),
    "untyped_storage()": lambda t: pickle.loads(pickle.dumps(t)),
    "untyped_storage": through_storage,
    "map_": lambda t: torch.zeros(t.shape).map_(t, lambda a, b: b),
    "apply_": lambda t: t.clone().apply_(lambda value: value + 1),
}


@pytest.mark.parametrize("op", EXITS)
def test_a_value_that_leaves_blocks_by_the_name_of_the_operation(op):
    (site,) = audit(Model(lambda model, t, x: EXITS[op](t)), inputs={"x": torch.randn(2, 3, WIDTH)}).sites
    found = [blocker for blocker in site.blockers if blocker.kind == "leaves-torch"]
    assert found, site.reason
    assert any(op.rstrip("()") in str(blocker) for blocker in found)
    if op != "__deepcopy__":  # that line is in Python's copy module
        assert all("test_exits.py" in blocker.where for blocker in found)


@pytest.mark.parametrize("op", EXITS)
def test_values_that_carry_no_gain_may_leave(op):
    model = Model(lambda model, t, x: EXITS[op](x))
    report, error = after_fold(model)
    assert report.folded == ["norm"]
    assert error < 1e-5


def test_a_weight_that_leaves_is_used_elsewhere():
    model = Model(lambda model, t, x: x @ torch.from_numpy(model.linear.weight.numpy().T.copy()))
    assert "linear.weight is also used by numpy" in audit(model, inputs={"x": torch.randn(2, 3, WIDTH)}).skipped["norm"]


def test_where_a_weight_lies_may_be_asked():
    model = Model(lambda model, t, x: x * float(model.linear.weight.data_ptr() != 0))
    report, _ = after_fold(model)
    assert report.folded == ["norm"]


def test_a_norm_that_hands_out_its_values_itself():
    class Logging(nn.RMSNorm):
        def forward(self, x):
            out = super().forward(x)
            self.log = out.clone().tolist()
            return out

    model = Model(lambda model, t, x: torch.tensor(model.norm.log))
    model.norm = settled(Logging(WIDTH, eps=1e-6))
    (site,) = audit(model, inputs={"x": torch.randn(2, 3, WIDTH)}).sites
    assert "leaves-torch" in [blocker.kind for blocker in site.blockers]
