"""Objects of torch's own stream and event classes, with a device or without."""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


def real(kind: type[T]) -> T:
    """One of `torch.cuda.Stream` or `torch.cuda.Event`. Without CUDA in the build the classes are plain Python ones."""
    if not torch.backends.cuda.is_built():
        return object.__new__(kind)
    if not torch.cuda.is_available():
        pytest.skip("this torch was built with CUDA, and its streams need a device")
    return kind()
