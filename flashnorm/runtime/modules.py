"""What stands in for a norm and its readers: the norm hands on its input, each reader takes norm and linear in one.

All of them hold the parameters of what they stand in for, the same objects under the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashnorm.errors import GradientError
from flashnorm.runtime.merging import Group
from flashnorm.runtime.products import gated_product, rms_product

# A product of several linears hangs, until they have taken it, on the tensor that they all read: it cannot be taken for
# that of another tensor, is gone with it, and calls on other threads have their own.
_HELD = "_flashnorm_held"


class _StandIn(nn.Module):
    """Tells its groups whenever a parameter of it gets other memory or values."""

    groups: tuple[Group, ...] = ()

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.training = original.training
        self._parameters.update(original._parameters)
        self._buffers.update(original._buffers)
        self._non_persistent_buffers_set |= original._non_persistent_buffers_set

    def _gather(self) -> None:
        for group in self.groups:
            group.gather()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._gather()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._gather()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parameters", ()):
            self._gather()


class DeferredNorm(_StandIn):
    """Hands on x (..., K) as it is; its readers know the norm. Raises `GradientError` where a gradient is wanted."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self._refuse_gradient(x)
        # A tensor object of its own, for what its readers share; that of x belongs to the residual stream.
        return x.view_as(x)

    def _refuse_gradient(self, x: Tensor) -> None:
        read = (parameter for group in self.groups for linear in group.linears for parameter in linear.parameters())
        if x.requires_grad or any(parameter.requires_grad for parameter in (*self.parameters(), *read)):
            raise GradientError(
                "an accelerated model has no backward; use torch.no_grad() or torch.inference_mode(), or call "
                "model.unaccelerate() to train it"
            )

    def extra_repr(self) -> str:
        return "its readers compute it"


class DeferredLinear(_StandIn):
    """RMSNorm, then linear: takes x (..., K) before the norm and returns (..., N). A part of its group's product."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__(original)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.group: Group | None = None
        self.part = 0

    def join(self, group: Group, part: int) -> None:
        """Become part number `part` of the group's product."""
        self.group, self.part, self.groups = group, part, (group,)

    def forward(self, x: Tensor) -> Tensor:
        group = self.group
        assert group is not None
        if len(group.sizes) == 1:
            return _product(x, group)
        held = getattr(x, _HELD, None)
        if held is None or held[0] is not group:
            held = (group, _product(x, group).split_with_sizes(group.sizes, -1))
            setattr(x, _HELD, held)
        part: Tensor = held[1][self.part]
        return part

    def extra_repr(self) -> str:
        shared = 0 if self.group is None else len(self.group.linears) - 1
        with_others = f", one product with {shared} more" if shared else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{with_others}"


class GatedMLP(_StandIn):
    """down(act(gate) ⊙ up) of an RMSNorm, from x (..., K) before the norm. Its children are those of the original."""

    def __init__(self, original: nn.Module, group: Group, down: str, activation: str) -> None:
        super().__init__(original)
        self._modules.update(original._modules)
        # Names that no child has: the children keep theirs, whatever they are.
        self.fused_group, self.fused_down, self.fused_activation = group, down, activation

    def forward(self, x: Tensor) -> Tensor:
        group = self.fused_group
        hidden = gated_product(x, group.require(), group.eps, group.gain, self.fused_activation, group.chosen)
        out: Tensor = self._modules[self.fused_down](hidden)  # type: ignore[misc]
        return out

    def extra_repr(self) -> str:
        return f"norm, gate, up and {self.fused_activation} as one operation"


def unlike_stock(model: nn.Module) -> frozenset[nn.Module]:
    """The modules of an accelerated model that do not return what the stock model's do: those must not be watched."""
    groups = (group for norm in model.modules() if isinstance(norm, DeferredNorm) for group in norm.groups)
    return frozenset(place.module for group in groups for place in group.places if not place.gives_stock)


def _product(x: Tensor, group: Group) -> Tensor:
    return rms_product(x, group.require(), group.eps, group.gain, group.bias, group.chosen)
