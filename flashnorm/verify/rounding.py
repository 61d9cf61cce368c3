"""How far apart two right answers may lie: the yardstick of every check that compares logits with logits.

**Model of rounding.** The answer f of an engine at a position is the exact one plus an error of mean zero and mean
square s² = E‖f - exact‖², where distances are taken up to a constant, as in `flashnorm.verify.drift`. Another right
answer c to the same question (from a cache, in a batch, in chunks) rounds as often and adds in another order, so its
error has the same mean square and is at best independent: E‖c - f‖² <= 2 s² + 2 s² in the worst case of opposed errors,
and 2 s² for independent ones. `allowed` takes the independent case at `SIGMAS` standard deviations,

    ‖c - f‖ <= SIGMAS sqrt(2) s,

as if all of the error lay along one direction; spread over more directions, as it is, ‖c - f‖ concentrates around
sqrt(2) s and exceeds the bound more rarely still.

**What s is.** Where the engine has an oracle, the root mean square of f's distance from it over sample positions; one
rounding of the logits themselves, u ‖f‖, is added in squares, so that an engine whose logits happen to be exact is
still allowed to round them. Without an oracle, see `estimated`.

**Choices.** A model that chooses (experts by top-k, say) may turn a near tie over where rounding differs, and then a
position's logits change by an amount that does not depend on the rounding, and through the cache those of every later
position of its sequence. That such operations run is seen by tracing one forward pass. For these models single
positions prove nothing. What is judged is the ratio of means over positions, and since the positions of a sequence are
not independent, its logarithm's standard error is taken at the largest it can be, sqrt(2) (see
`flashnorm.verify.bounds`). A fault that shows `everywhere`, as one of the cache does, must raise the median as well,
which a choice that turns over late in a sequence does not. What remains: a choice that turns over in the first half of
every sequence fails a healthy model. It takes a tie within the unit roundoff, so in fp32 a chance of the order of u
for each token and layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashnorm.verify.bounds import SIGMAS
from flashnorm.verify.drift import squared_drift
from flashnorm.verify.engines.engine import Engine
from flashnorm.verify.report import Check

_CHOICES = {"topk", "argmax", "argmin", "sort", "argsort", "max", "multinomial", "bernoulli"}


@dataclass(frozen=True)
class Rounding:
    """`squares`: (positions,) fp64, squared distance of fresh logits from exact ones. `routed`: the model chooses.

    `measured`: from an oracle; otherwise estimated.
    """

    squares: Tensor
    routed: bool
    measured: bool = True

    @property
    def scale(self) -> float:
        """s: the root mean square error of one position's logits; where choices turn over, that of a typical one."""
        return math.sqrt(float(self.squares.median() if self.routed else self.squares.mean()))

    @property
    def allowed(self) -> float:
        """The largest distance of two right answers at one position."""
        return SIGMAS * math.sqrt(2) * self.scale


def measure_rounding(engine: Engine, ids: Tensor) -> Rounding:
    """From fresh logits of `ids` (rows, length) and the oracle's."""
    with _Choices() as choices:
        fresh = engine.fresh(ids).flatten(0, -2).cpu()
    unit = torch.finfo(engine.dtype).eps / 2
    rounded = (unit * torch.linalg.vector_norm(fresh, dim=-1, dtype=torch.float64)).square()
    if engine.exact is None:
        return estimated(rounded, engine.dtype, choices.seen)
    exact = engine.exact(ids).flatten(0, -2)
    return Rounding(squared_drift(fresh, exact) + rounded, choices.seen)


def estimated(rounded: Tensor, dtype: torch.dtype, routed: bool) -> Rounding:
    """Without an oracle nobody knows how often the engine rounds, nor how much it amplifies.

    What is known is that a computation that loses more than half of its digits is not stable in its dtype (Higham,
    Accuracy and Stability of Numerical Algorithms, 1.7). So SIGMAS sqrt(2) s is set to sqrt(u) ‖f‖. `rounded`:
    (positions,), u² ‖f‖².
    """
    unit = torch.finfo(dtype).eps / 2
    return Rounding(rounded / unit / (2 * SIGMAS**2), routed, measured=False)


def distance_check(
    name: str,
    squares: Tensor,
    rounding: Rounding,
    words: Callable[[int, float], str],
    *,
    everywhere: bool = False,
) -> Check:
    """Whether rounding explains squared distances (positions,) of answers that should be the same.

    `words`: from the index of the worst position and its distance in units of the allowed one, what a failure means.
    `everywhere`: whether the faults looked for show at most positions. The figure is in units of what is allowed.
    """
    if not squares.isfinite().all():
        return Check(name, math.nan, 1.0, words(int((~squares.isfinite()).nonzero()[0]), math.nan))
    worst = int(squares.argmax())
    excess = math.sqrt(float(squares[worst])) / rounding.allowed
    if not rounding.routed:
        return Check(name, excess, 1.0, words(worst, excess))
    ratio = float(squares.mean()) / float(rounding.squares.mean())
    figure = math.sqrt(ratio / (2 * math.exp(SIGMAS * math.sqrt(2))))
    if everywhere:
        figure = min(figure, math.sqrt(float(squares.median())) / rounding.allowed)
    return Check(name, figure, 1.0, words(worst, excess))


class _Choices(TorchFunctionMode):
    """Notices operations that turn a small difference into a large one: choices among floating-point values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _CHOICES and args and isinstance(args[0], Tensor):
            several = args[0].is_floating_point() and (len(args) > 1 or bool(kwargs))  # `x.max()` chooses nothing
            self.seen |= several and not (func.__name__ == "max" and len(args) > 1 and isinstance(args[1], Tensor))
        return func(*args, **(kwargs or {}))
