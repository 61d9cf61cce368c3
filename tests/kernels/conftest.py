"""Kernels run compiled where a GPU is, and through Triton's interpreter on the CPU elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

import torch

if not torch.cuda.is_available() and find_spec("triton") is not None:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_index(tensor: object, scope: object) -> None:
        """Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses; `item` is the same number."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_index
