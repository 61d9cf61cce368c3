"""Where stand-ins and what belongs to them were put: what is changed there afterwards would silently be left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from flashnorm.errors import Refusal


@dataclass(frozen=True)
class Place:
    """A child of `parent` on whose being there, and being called as usual, a product relies.

    `takes_stock`, `gives_stock`: whether it is called with, and returns, what the stock model's module does, so that
    hooks before and after it see what they would see there.
    """

    name: str  # from the model on
    parent: nn.Module
    child: str
    module: nn.Module
    takes_stock: bool
    gives_stock: bool

    def fault(self) -> str | None:
        """What was done to it that the product cannot follow, as a sentence."""
        module = self.module
        if self.parent._modules.get(self.child) is not module:
            return f"{self.name} was replaced"
        if (module._forward_pre_hooks and not self.takes_stock) or (module._forward_hooks and not self.gives_stock):
            return f"a hook was put on {self.name}, which is not called with or does not return what it usually does"
        return None


def require_intact(places: Iterable[Place]) -> None:
    """Raises `Refusal` where a place is not as it was when the model was accelerated."""
    for place in places:
        fault = place.fault()
        if fault:
            raise Refusal(f"{fault} while the model is accelerated; call model.unaccelerate() first")
