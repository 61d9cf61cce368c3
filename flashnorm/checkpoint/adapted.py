"""Which weight of a folded base each entry of an adapter changes, and along which of its axes the gains lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashnorm.checkpoint.folded_base import FoldedBase, Gain, Weight
from flashnorm.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """The weight that a pair of factors adapts.

    `gains`: each with its axis in the orientation of B A: 1 for the input, which A reads, 0 for the output, which B
    writes. `module`: whether it is the weight of a module, so that PEFT can give its adapter a bias.
    """

    weight: Weight
    gains: tuple[tuple[Gain, int], ...]
    module: bool


def factors_target(base: FoldedBase, module: str, a: torch.Tensor, b: torch.Tensor) -> Target:
    """The target of the factors `a`, `b` that an adapter holds for `module`. Raises `CheckpointError` where it changes
    a norm, matches nothing in the base, does not fit it, or cannot be told apart from another weight."""
    path = module
    while path.endswith(".base_layer"):  # PEFT wraps a module once for each of its parameters that are adapted
        path = path.removesuffix(".base_layer")
    _refuse_norm(base, path)
    weight = find_weight(base, f"{path}.weight")
    if weight is None:
        return _parameter_target(base, path, a, b)
    gains = _known_gains(weight)
    if a.ndim > 2:
        fits = a.shape[1:] == weight.shape[1:] and b.shape[:2] == (weight.shape[0], a.shape[0])
        if gains:
            raise CheckpointError(
                f"the adapter changes {path}, a convolution that folding scaled; it cannot be translated"
            )
    else:
        outputs_inputs = weight.shape[::-1] if weight.transposed else weight.shape
        fits = (b.shape[0], a.shape[1]) == outputs_inputs and a.shape[0] == b.shape[1]
    if not fits:
        raise _misfit(module, a, b, weight)
    return Target(weight, tuple((gain, 1 - gain.axis if weight.transposed else gain.axis) for gain in gains), True)


def copy_target(base: FoldedBase, path: str, copy: torch.Tensor) -> Weight:
    """The weight that an adapter replaces by `copy`. Raises `CheckpointError` as `factors_target` does.

    The copy may have another number of rows: adding tokens to a vocabulary lengthens its weights.
    """
    _refuse_norm(base, path.rpartition(".")[0])
    weight = find_weight(base, path)
    if weight is None:
        raise CheckpointError(
            f"the adapter replaces {path!r}, which the base does not store, so what it reads there is unknown; "
            "train the adapter on the folded base instead"
        )
    _known_gains(weight)
    same_rows = copy.ndim > 1 or copy.shape == weight.shape
    if copy.ndim != len(weight.shape) or copy.shape[1:] != weight.shape[1:] or not same_rows:
        raise CheckpointError(
            f"the adapter replaces {path!r} by a tensor of shape {list(copy.shape)}, the base's has shape "
            f"{list(weight.shape)}; give the base that the adapter was trained for"
        )
    return weight


def find_weight(base: FoldedBase, path: str) -> Weight | None:
    """The weight that an adapter means by `path`: in the model, with or without its head, or in the files."""
    for name in _spellings(base, path):
        if name in base.parameters:
            return base.parameters[name]
    return base.stored.get(path)


def _parameter_target(base: FoldedBase, path: str, a: torch.Tensor, b: torch.Tensor) -> Target:
    """A parameter of a module, such as stacked experts: PEFT's keys name only the module, so shapes must tell which."""
    parents = set(_spellings(base, path))
    children = [weight for name, weight in base.parameters.items() if name.rpartition(".")[0] in parents]
    if not children:
        raise CheckpointError(
            f"the adapter changes {path!r}, which the base does not have; give the base that it was trained for"
        )
    fitting = [weight for weight in children if _fits_parameter(weight.shape, a, b)]
    if not fitting:
        raise _misfit(path, a, b, *children)
    gains = _known_gains(fitting[0])
    for other in fitting[1:]:
        others = _known_gains(other)
        if len(others) != len(gains) or not all(g.same_place(o) for g, o in zip(gains, others, strict=True)):
            raise CheckpointError(
                f"the adapter changes {path!r}, and its shapes fit both {fitting[0].name} and {other.name}, which "
                "folding treated differently; train it on the folded base instead"
            )
    return Target(fitting[0], tuple((gain, _side(fitting[0], gain, a, b)) for gain in gains), False)


def _fits_parameter(shape: tuple[int, ...], a: torch.Tensor, b: torch.Tensor) -> bool:
    """For experts, PEFT holds A: (experts · rank, one side) and B: (other side, experts · rank), in either layout."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        return False
    sides = a.shape[1], b.shape[0]
    if len(shape) == 2:
        return sides == shape[::-1]
    return len(shape) == 3 and a.shape[0] % shape[0] == 0 and sides in (shape[1:], shape[:0:-1])


def _side(weight: Weight, gain: Gain, a: torch.Tensor, b: torch.Tensor) -> int:
    """1 where the gain lies along the axis that A has, 0 where along the one that B has."""
    if len(weight.shape) == 2:
        return gain.axis
    if weight.shape[1] == weight.shape[2]:
        raise CheckpointError(
            f"the adapter changes {weight.name}, whose matrices are square, so the shapes do not tell which factor "
            "reads the norm; train it on the folded base instead"
        )
    return 1 if a.shape[1] == weight.shape[gain.axis] else 0


def _known_gains(weight: Weight) -> tuple[Gain, ...]:
    if weight.gains is None:
        raise CheckpointError(
            f"the adapter changes {weight.name}, in which folding scaled some parts and not others; train it on the "
            "folded base instead"
        )
    return weight.gains


def _refuse_norm(base: FoldedBase, module: str) -> None:
    for name in _spellings(base, module):
        if name in base.norms:
            raise CheckpointError(
                f"the adapter changes the norm {name}, whose gain belongs to the weights after it once it is folded; "
                "merge the adapter into the original model, then fold that"
            )


def _spellings(base: FoldedBase, path: str) -> Iterator[str]:
    """An adapter may have been trained on the model without its head, or the base be stored so."""
    yield path
    if base.prefix:
        yield f"{base.prefix}.{path}"
        if path.startswith(f"{base.prefix}."):
            yield path.removeprefix(f"{base.prefix}.")


def _misfit(module: str, a: torch.Tensor, b: torch.Tensor, *weights: Weight) -> CheckpointError:
    shapes = " or ".join(f"{list(weight.shape)} ({weight.name})" for weight in weights)
    return CheckpointError(
        f"the adapter's factors for {module!r} have shapes {list(a.shape)} and {list(b.shape)}, which do not fit "
        f"{shapes}; give the base that the adapter was trained for"
    )
