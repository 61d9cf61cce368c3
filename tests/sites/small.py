"""Small models around norms, and what a fold does to their output."""

from __future__ import annotations

import torch
from torch import nn

from flashnorm.passes.fold import fold
from flashnorm.sites.folding import FoldReport

WIDTH, OUT, TOKENS = 8, 6, 5


def settled(model: nn.Module) -> nn.Module:
    """`model` with random gains and biases in its norms, in eval mode."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            for own in module.parameters():
                nn.init.normal_(own, 0.7, 0.5, generator=generator)
    return model.eval()


@torch.no_grad()
def after_fold(model: nn.Module, x: torch.Tensor | None = None) -> tuple[FoldReport, float]:
    """Fold `model` in place; the report, and how far its output moved, relative to its norm."""
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)) if x is None else x
    before = model(x)
    report = fold(model, inputs={"x": x})
    return report, float((model(x).double() - before.double()).norm() / before.double().norm())
