"""Where values leave PyTorch, for NumPy or plain Python, and may come back unseen as new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

# Methods of tensors that hand out values, or memory, without any operation that a dispatch mode would see.
_METHODS = {
    "numpy", "tolist", "item", "__array__", "__dlpack__", "__float__", "__int__", "__index__", "__complex__",
    "__deepcopy__", "apply_", "map_", "data_ptr", "untyped_storage", "storage", "share_memory_",
}  # fmt: skip
# Functions that make tensors of Python data, in which other tensors may lie.
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


class Exits(TorchFunctionMode):
    """Reports every tensor whose values leave PyTorch, with the name of what takes them out."""

    def __init__(self, report: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS or func in _MAKERS:
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, torch.Tensor):
                    self._report(name, leaf)
        return func(*args, **(kwargs or {}))
