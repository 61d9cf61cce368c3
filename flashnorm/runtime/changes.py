"""What hangs on a model, or was changed on it since, that a stand-in or a decode program would leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

# Transformers leaves hooks on a model's layers that was asked for hidden states once; they record when asked, no more.
_RECORDING = "transformers.utils.output_capturing"


def attached(name: str, module: nn.Module, *, recording: bool = True) -> str | None:
    """What else than its class's own `forward` runs when the module is called, as a sentence; None for nothing.

    `recording`: whether Transformers' own recording of outputs counts.
    """
    shown = name or "the model"
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [hook for kind in kinds if kind for hook in kind.values()]
    if any(recording or getattr(hook, "__module__", None) != _RECORDING for hook in hooks):
        return f"a hook hangs on {shown}"
    if "forward" in module.__dict__ and not _is_own(module.__dict__["forward"], module):
        return f"the forward of {shown} was replaced by another library"
    return None


def _is_own(forward: Any, module: nn.Module) -> bool:
    """Whether it is the class's own after all: who replaces it for a while may put it back in this way."""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def anything_attached(model: nn.Module, *, recording: bool = True) -> str | None:
    """The first such sentence about any of the model's modules."""
    found = (attached(name, module, recording=recording) for name, module in model.named_modules())
    return next((sentence for sentence in found if sentence), None)


@dataclass(frozen=True)
class _Held:
    """A parameter as it was: the object, where its values lie, and how often they had been written to."""

    parameter: Tensor | None
    address: int
    version: int

    def is_like(self, other: _Held | None) -> bool:
        same = other is not None and self.parameter is other.parameter
        return same and (self.address, self.version) == (other.address, other.version)  # type: ignore[union-attr]


class Snapshot:
    """A model as it was when a program read it: its modules and parameters, held by reference.

    What is written through `parameter.data` leaves no trace, and is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._held = {
            name: {own: _held(parameter) for own, parameter in module._parameters.items()}
            for name, module in self._modules.items()
        }

    def change(self, model: nn.Module) -> str | None:
        """The first thing about `model` for which the program may give another result, as a sentence; None if none."""
        if model.training:
            return "the model is in training mode"
        now = dict(model.named_modules(remove_duplicate=False))
        for name in (*self._modules, *now):
            if now.get(name) is not self._modules.get(name):
                return f"{name} was replaced, added or removed"
        for name, module in now.items():
            sentence = attached(name, module, recording=False) or self._parameter_change(name, module)
            if sentence:
                return sentence
        return None

    def _parameter_change(self, name: str, module: nn.Module) -> str | None:
        before = self._held[name]
        for own in {**before, **module._parameters}:
            if not _held(module._parameters.get(own)).is_like(before.get(own)):
                return f"{name}.{own} was given other values"
        return None


def _held(parameter: Tensor | None) -> _Held:
    if parameter is None:
        return _Held(None, 0, 0)
    version = 0 if parameter.is_inference() else parameter._version  # inference tensors count no versions
    return _Held(parameter, parameter.data_ptr(), version)
