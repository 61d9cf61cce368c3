"""Random weights under which every parameter matters: no gain at its identity, no bias at zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

WEIGHT_STD = 0.08
GAIN_STD = 0.3
BIAS_STD = 0.1
SMALL_INIT = 0.05  # matrices whose init is smaller than this are redrawn, larger ones (embeddings) are kept


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Makes `torch.empty` return NaN, so that a parameter which no initialiser wrote can be told."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Redraws the parameters of `model` in place.

    Gains: their initial value plus 0.3 N(0, 1), which is around 1 for plain norms and around 0 for one-plus norms.
    Other vectors (biases, sinks, decay rates): initial value plus 0.1 N(0, 1). Matrices: N(0, 0.08), except those
    that were initialised to something larger on purpose. An embedding's padding row is zero, as loaders may make it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = model.get_submodule(name.rpartition(".")[0])
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(_drawn(module, name, parameter, noise))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0


def _drawn(module: torch.nn.Module, name: str, parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    written = bool(torch.isfinite(parameter).all())
    if _is_gain(module, name, parameter):
        return (parameter if written else 1) + GAIN_STD * noise
    if parameter.ndim < 2 or name.endswith("bias"):
        return (parameter if written else 0) + BIAS_STD * noise
    keep = written and parameter.abs().mean() > SMALL_INIT
    return parameter if keep else WEIGHT_STD * noise


def _is_gain(module: torch.nn.Module, name: str, parameter: torch.Tensor) -> bool:
    """A norm's weight: a vector, or several vectors that all start at the same value."""
    in_norm = "norm" in (type(module).__name__ + name).lower() and not name.endswith("bias")
    return in_norm and (parameter.ndim < 2 or _constant(parameter))


def _constant(parameter: torch.Tensor) -> bool:
    return bool(parameter.min() == parameter.max())
