"""Where several sets of shadows run side by side: one of them, as the rules of `operations` see it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashnorm.sites.tracing import Follower
from flashnorm.sites.weights import Located, Read


class Layer:
    """A set of shadows of a follower that reads products by rules of its own."""

    def __init__(self, follower: Follower, shadow: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """`shadow`: the shadow of a tensor, of its shape; None where it is plain data."""
        self._follower, self.shadow = follower, shadow

    @property
    def number_read(self) -> bool:
        return self._follower.number_read

    def locate(self, tensor: torch.Tensor) -> Located | None:
        return self._follower.locate(tensor)

    def read(self, located: Located, dim: int, codes: torch.Tensor, read: Read) -> bool:
        raise AssertionError("products have rules of their own here")

    def read_as(self, op: str, bias: torch.Tensor | None, pure: bool) -> Read:
        raise AssertionError("products have rules of their own here")
