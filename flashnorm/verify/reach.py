"""Which weights a run uses: a text model's logits say nothing about a vision tower that token ids do not reach."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from flashnorm.verify.forward import TransformersModel


class _Uses(TorchFunctionMode):
    """Collects the identity of every tensor that is given to an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Asking a weight for its dtype, device or shape, as model code does of towers that it then leaves out, uses it
        # as little as assigning an attribute; asking for its transpose or its data is a use.
        if isinstance(result, torch.Tensor) or getattr(func, "__name__", "") not in ("__get__", "__set__"):
            self.seen.update(id(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return result


@contextmanager
def unused_weights(model: TransformersModel) -> Iterator[set[str]]:
    """Gives a set that holds, once the block is over, the names in the `state_dict` that nothing in it used.

    Tied weights are one tensor, so that a use under one name counts for all.
    """
    named = model.state_dict(keep_vars=True)
    unused: set[str] = set()
    with _Uses() as uses:
        yield unused
    unused.update(name for name, tensor in named.items() if id(tensor) not in uses.seen)


def fingerprints(model: TransformersModel, names: set[str]) -> dict[str, str]:
    """The SHA-256 of the values of each of `names` in the model's `state_dict`."""
    return {name: _sha256(tensor) for name, tensor in model.state_dict().items() if name in names}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """The names whose fingerprints are not the same, those that only one of the two has included."""
    return tuple(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
