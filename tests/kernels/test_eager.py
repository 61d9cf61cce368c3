"""An operation goes past the dispatcher where nobody looks on, and only there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from flashnorm.kernels import rms_linear, rms_swiglu_linear
from flashnorm.kernels.eager import plain

X, WEIGHT = torch.randn(3, 8), torch.randn(4, 8)
OPERATIONS = {"rms_linear": rms_linear, "rms_swiglu_linear": rms_swiglu_linear}


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class _More(torch.Tensor):
    pass


def test_tensors_alone_are_plain() -> None:
    assert plain(X, None, torch.nn.Parameter(WEIGHT, requires_grad=False))
    with torch.no_grad():
        assert plain(torch.nn.Parameter(WEIGHT))
    with torch.inference_mode():
        assert plain(X)


def test_whatever_looks_on_is_not() -> None:
    assert not plain(X, torch.nn.Parameter(WEIGHT))  # a gradient is asked for
    assert not plain(X.as_subclass(_More))
    assert not plain(torch.empty(2, device="meta"))
    with FakeTensorMode() as mode:
        assert not plain(mode.from_tensor(X))
    with _Seen():
        assert not plain(X)
    with profile():
        assert not plain(X)
    inside: list[bool] = []
    torch.vmap(lambda x: inside.append(plain(x)) or x)(X)
    assert inside == [False]
    assert torch.compile(lambda x: x + plain(x), backend="eager")(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_both_ways_give_the_same_and_a_mode_sees_the_operation(name: str) -> None:
    operation = OPERATIONS[name]
    alone = operation(X, WEIGHT, 1e-6)
    with _Seen() as seen:
        observed = operation(X, WEIGHT, 1e-6)
    assert torch.equal(alone, observed)
    assert f"flashnorm::{name}" in seen.names


@pytest.mark.parametrize("name", OPERATIONS)
def test_alone_it_does_not_pass_through_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("dispatched")

    operation = OPERATIONS[name]
    module = __import__(operation.__module__, fromlist=["_made"])
    monkeypatch.setattr(module, "_rms_swiglu_linear" if name == "rms_swiglu_linear" else "_rms_linear", refused)
    if name == "rms_linear":
        monkeypatch.setattr(torch.ops.flashnorm, "rms_linear", refused)
    operation(X, WEIGHT, 1e-6)
    with _Seen(), pytest.raises(AssertionError, match="dispatched"):
        operation(X, WEIGHT, 1e-6)
