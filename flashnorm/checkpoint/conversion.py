"""Where every stored tensor goes in the model: what Transformers does to names and layouts while loading.

Checkpoints store experts one by one, or projections fused, and Transformers rearranges them on load. Nothing here knows
those rearrangements: the loader's own conversions are run on numbered stand-ins, and the numbers tell where each
position of a stored tensor ends up. This is the only file that touches the loader's internals.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from flashnorm.algebra import least_channels
from flashnorm.errors import CheckpointError


@dataclass(frozen=True)
class Placement:
    """A stored tensor inside one parameter. For each parameter axis that the stored tensor has too:

    `axes[parameter_axis] = (stored_axis, positions)`, where `positions[i]` is the position along the parameter's axis
    of position i along the stored axis, -1 where it lies in another parameter; None means the same position.
    """

    parameter: str
    shape: tuple[int, ...]  # of the parameter
    axes: dict[int, tuple[int, torch.Tensor | None]]

    def to_stored(self, axis: int, line: torch.Tensor, rest: int) -> torch.Tensor:
        """What a line along the parameter's `axis` says of each stored position; `rest` where that lies elsewhere."""
        positions = self.axes[axis][1]
        return line if positions is None else torch.where(positions >= 0, line[positions.clamp(min=0)], rest)

    def to_parameter(self, axis: int, line: torch.Tensor, rest: int) -> torch.Tensor:
        """What a line along the stored axis says of each position of the parameter's `axis`; `rest` where nothing."""
        positions = self.axes[axis][1]
        where = torch.arange(len(line)) if positions is None else positions
        found = torch.full((self.shape[axis],), rest, dtype=line.dtype)
        found[where[where >= 0]] = line[where >= 0]
        return found


def placements(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Placement]]:
    """For every stored tensor (name -> shape) that the loader uses: where it goes. Others are absent.

    `model`: the (hollow) Transformers model that will load the checkpoint. Raises `CheckpointError` where the loader
    would reject the tensors' shapes.
    """
    return _Loader(model, shapes).run()


def stored_name(model: PreTrainedModel, parameter: str) -> str:
    """The name under which a parameter of `model` is saved."""
    saved = loading.revert_weight_conversion(model, {parameter: torch.zeros(1)})
    return str(next(iter(saved)))


@dataclass(frozen=True)
class _Lesson:
    """What one conversion does to each tensor of each of its patterns, learned in the layer of `target`."""

    target: str
    pieces: dict[str, tuple[list[Placement], ...]]


class _Loader:
    """Replays the loader's bookkeeping over names and stand-ins."""

    def __init__(self, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]):
        self.model, self.shapes = model, shapes
        mapping = get_model_conversion_mapping(model)
        self.renamings = [m for m in mapping if isinstance(m, loading.WeightRenaming)]
        self.converters = [m for m in mapping if isinstance(m, loading.WeightConverter)]
        self.parameters = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.by_pattern = {p: c for c in self.converters for p in c.source_patterns}
        self.learned: dict[Any, _Lesson] = {}

    def run(self) -> dict[str, list[Placement]]:
        found: dict[str, list[Placement]] = {}
        groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(self.shapes, key=loading.dot_natural_key):
            target, pattern = self._target(name)
            if target not in self.parameters:
                continue
            if pattern is None:
                found[name] = [self._same(name, target)]
            else:
                groups[target][pattern].append(name)
        for target, sources in groups.items():
            found.update(self._converted(target, sources))
        return found

    def _target(self, name: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        target, pattern = loading.rename_source_key(name, self.renamings, self.converters, prefix, self.parameters)
        if target not in self.parameters and name in self.parameters:
            target, pattern = loading.rename_source_key(name, [], [], prefix, self.parameters)
        return target, pattern

    def _same(self, name: str, target: str) -> Placement:
        shape = tuple(self.parameters[target])
        if tuple(self.shapes[name]) != shape:
            raise CheckpointError(
                f"{name} is stored with shape {list(self.shapes[name])} but the config asks for {list(shape)}; "
                "the checkpoint and its config.json do not belong together"
            )
        return Placement(target, shape, {axis: (axis, None) for axis in range(len(shape))})

    def _converted(self, target: str, sources: dict[str, list[str]]) -> dict[str, list[Placement]]:
        """Where the tensors of one conversion go; layers that differ only in their numbers are converted alike."""
        converter = self.by_pattern[next(iter(sources))]
        kinds = tuple((pattern, *(self.shapes[name] for name in names)) for pattern, names in sources.items())
        signature = (id(converter), re.sub(r"\d+", "#", target), kinds)
        if signature not in self.learned:
            self.learned[signature] = _Lesson(target, self._learn(converter, target, sources))
        lesson = self.learned[signature]
        return {
            name: [replace(piece, parameter=_rename(piece.parameter, lesson.target, target)) for piece in pieces]
            for pattern, names in sources.items()
            for name, pieces in zip(names, lesson.pieces[pattern], strict=True)
        }

    def _learn(
        self, converter: Any, target: str, sources: dict[str, list[str]]
    ) -> dict[str, tuple[list[Placement], ...]]:
        """Per pattern, the placements of each tensor of its list.

        A list is a stack of experts as a rule. Those that differ in their numbers alone are treated alike, unless the
        first, the middle and the last of them are not: then each is looked at.
        """
        learned: dict[str, tuple[list[Placement], ...]] = {}
        for pattern, names in sources.items():
            kinds: dict[Any, list[str]] = defaultdict(list)
            for name in names:
                kinds[re.sub(r"\d+", "#", name), self.shapes[name]].append(name)
            found: dict[str, list[Placement]] = {}
            for alike in kinds.values():
                samples = {name: self._place(converter, target, sources, name) for name in _samples(alike)}
                first = samples[alike[0]]
                if all(_alike(first, other) for other in samples.values()):
                    found.update(dict.fromkeys(alike, first))
                else:
                    found.update({name: self._place(converter, target, sources, name) for name in alike})
            learned[pattern] = tuple(found[name] for name in names)
        return learned

    def _place(self, converter: Any, target: str, sources: dict[str, list[str]], name: str) -> list[Placement]:
        axes: dict[str, dict[int, tuple[int, torch.Tensor | None]]] = defaultdict(dict)
        for axis, length in enumerate(self.shapes[name]):
            for parameter, landed in self._follow(converter, target, sources, name, axis).items():
                self._check_stack(parameter, landed, sources)
                where = _axis_of(landed, length)
                if where is not None:
                    axes[parameter][where[0]] = (axis, where[1])
        return [Placement(parameter, tuple(self.parameters[parameter]), found) for parameter, found in axes.items()]

    def _check_stack(self, parameter: str, landed: torch.Tensor, sources: dict[str, list[str]]) -> None:
        """Tensors that are stored one by one become the first axis of a parameter: there must be as many as it has."""
        wanted = tuple(self.parameters[parameter])
        first = next((names[0] for names in sources.values() if len(names) == len(landed)), None)
        stacked = first is not None and len(self.shapes[first]) + 1 == landed.ndim == len(wanted)
        if stacked and len(landed) != wanted[0]:
            raise CheckpointError(
                f"{first} and its like, {len(landed)} in number, make up {parameter}, for which the config asks for "
                f"{wanted[0]}; the checkpoint and its config.json do not belong together"
            )

    def _follow(
        self, converter: Any, target: str, sources: dict[str, list[str]], name: str, axis: int
    ) -> dict[str, torch.Tensor]:
        """Number the positions along one axis of one tensor, convert, and return what came out.

        A tensor that is converted alone keeps its size, since such conversions may look at it (is it transposed
        already?). The many tensors of a stack are narrowed, or they would not fit in memory.
        """
        others = sum(len(names) for names in sources.values()) - 1
        if others:
            with suppress(Exception):  # a conversion that checks sizes rejects narrow stand-ins in its own way
                return self._convert(converter, target, sources, name, axis, narrow=True)
        try:
            return self._convert(converter, target, sources, name, axis, narrow=False)
        except Exception as error:  # the loader would fail at the same tensors
            stored = f"{name} and {others} more" if others else name
            raise CheckpointError(
                f"what is stored for {target} ({stored}) cannot be put together: {error}; the checkpoint and its "
                "config.json do not belong together"
            ) from error

    def _convert(
        self, converter: Any, target: str, sources: dict[str, list[str]], name: str, axis: int, narrow: bool
    ) -> dict[str, torch.Tensor]:
        run = copy.deepcopy(converter)
        for pattern, names in sources.items():
            for other in names:
                shape = list(self.shapes[other])
                if narrow:
                    shape = [n if d == axis else min(n, _NARROW) for d, n in enumerate(shape)]
                run.add_tensor(target, other, pattern, _stand_in(shape, axis if other == name else None))
        with _quiet():
            converted = run.convert(target, model=self.model, config=getattr(self.model, "config", None))
        whole = {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}
        return {key: tensor for key, tensor in whole.items() if tensor.any()}


# Wide enough for conversions that cut an axis into a few pieces; the axis that is followed keeps its length.
_NARROW = 8


def _stand_in(shape: list[int], axis: int | None) -> torch.Tensor:
    """A tensor of this shape that holds no memory: numbered from 1 along `axis`, or zero."""
    if axis is None:
        return torch.zeros((), dtype=torch.int32).expand(shape)
    numbers = torch.arange(1, shape[axis] + 1, dtype=torch.int32)
    return numbers.view([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def _samples(names: list[str]) -> set[str]:
    return {names[0], names[len(names) // 2], names[-1]}


def _alike(a: list[Placement], b: list[Placement]) -> bool:
    """Both lie in the same parameters in the same way."""

    def plain(pieces: list[Placement]) -> list[Any]:
        return [
            (p.parameter, {axis: (s, None if i is None else i.tolist()) for axis, (s, i) in p.axes.items()})
            for p in pieces
        ]

    return plain(a) == plain(b)


def _rename(parameter: str, learned_for: str, target: str) -> str:
    """Carry a parameter name from the layer it was learned in over to the layer of `target`."""
    if learned_for == target:
        return parameter
    learned, wanted, parts = learned_for.split("."), target.split("."), parameter.split(".")
    changed = {i: w for i, (a, w) in enumerate(zip(learned, wanted, strict=True)) if a != w}
    return ".".join(changed.get(i, part) for i, part in enumerate(parts))


def _axis_of(landed: torch.Tensor, length: int) -> tuple[int, torch.Tensor | None] | None:
    """Along which axis of a converted tensor the numbers run, and which position each stored position took."""
    for axis in range(landed.ndim):
        others = [d for d in range(landed.ndim) if d != axis]
        line = landed.amax(others) if others else landed
        shape = [-1 if d == axis else 1 for d in range(landed.ndim)]
        if not ((landed == 0) | (landed == line.view(shape))).all() or (line > 0).sum() < min(length, 2):
            continue
        positions = torch.full((length,), -1, dtype=torch.int64)
        taken = (line > 0).nonzero().flatten()
        positions[line[taken].long() - 1] = taken
        if len(torch.unique(line[taken])) != len(taken):
            continue
        return axis, least_channels(positions, len(line))
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """The loader logs its own report of a failed conversion; ours is the error that is raised."""
    logger = logging.getLogger("transformers.core_model_loading")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
