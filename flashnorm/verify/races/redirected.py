"""Methods of tensors whose bindings ask for a CUDA device, sent by the operators that they stand for.

`copy_` and indexing set the current device before they dispatch, which a build without CUDA refuses even for fake
tensors; the operators themselves do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten


class Redirected(TorchFunctionMode):
    """While it is active, `copy_`, `x[...]` and `x[...] = ...` run on fake CUDA tensors anywhere."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_:
            return _aten.copy_.default(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            return _read(*args)
        if func is Tensor.__setitem__:
            return _assign(*args)
        return func(*args, **(kwargs or {}))


def _read(tensor: Tensor, index: Any) -> Tensor:
    view, tensors = _basic(tensor, index)
    return _aten.index.Tensor(view, tensors) if tensors else view


def _assign(tensor: Tensor, index: Any, value: Any) -> None:
    view, tensors = _basic(tensor, index)
    given = value if isinstance(value, Tensor) else torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if tensors:
        _aten.index_put_.default(view, tensors, given)
    else:
        _aten.copy_.default(view, given)


def _basic(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that slices, numbers, None and an ellipsis select, and what indexes it by tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        used = sum(part is not None and part is not Ellipsis for part in parts)
        parts[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    axis, tensors = 0, list[Tensor | None]()
    for part in parts:
        if isinstance(part, int):
            tensor = _aten.select.int(tensor, axis, part)
            continue
        if part is None:
            tensor = _aten.unsqueeze.default(tensor, axis)
        elif isinstance(part, slice):
            end = part.stop if part.stop is not None else tensor.shape[axis]
            tensor = _aten.slice.Tensor(tensor, axis, part.start or 0, end, part.step or 1)
        else:
            tensors += [None] * (axis - len(tensors)) + [torch.as_tensor(part)]
        axis += 1
    return tensor, tensors
