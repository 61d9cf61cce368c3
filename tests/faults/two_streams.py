"""The two-stream operation with one mistake each in how its streams are joined."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashnorm.kernels.two_stream import _wide_product


class TwoStreams:
    """y = (x Wᵀ) / sqrt(mean(x²) + eps) with the sum of squares on a side stream; right, unless a method is overridden.

    Unlike `overlapped_rms_linear` it keeps its side stream, its events and the buffer of the scale from call to call.
    """

    def __init__(self) -> None:
        self._scale: Tensor | None = None
        self._side: torch.cuda.Stream | None = None

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        main = torch.cuda.current_stream(x.device)
        if self._side is None:
            self._side, self._fork, self._join = torch.cuda.Stream(x.device), torch.cuda.Event(), torch.cuda.Event()
            self._scale = torch.empty(x.shape[0], 1, device=x.device, dtype=torch.float32)
        self.fork(main)
        with torch.cuda.stream(self._side):
            self._scale.copy_(torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps))
            self.record_join()
        product = self.multiply(x, weight)
        self.join(main)
        result = (product * self._scale).to(x.dtype)
        self.leave(main)
        return result

    def fork(self, main: torch.cuda.Stream) -> None:
        """The side stream waits for the input, and for the last call's use of the scale."""
        self._fork.record(main)
        self._side.wait_event(self._fork)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return _wide_product(x, weight)

    def record_join(self) -> None:
        self._join.record(self._side)

    def join(self, main: torch.cuda.Stream) -> None:
        main.wait_event(self._join)

    def leave(self, main: torch.cuda.Stream) -> None:
        pass


class ImplicitJoin(TwoStreams):
    """Neither stream waits for the other: they are taken to be joined because the code comes later."""

    def join(self, main: torch.cuda.Stream) -> None:
        pass


class JoinedAfterwards(ImplicitJoin):
    """The wait for the scale is there, and comes when the result is made already: a capture accepts that."""

    def leave(self, main: torch.cuda.Stream) -> None:
        main.wait_event(self._join)


class MissingFork(TwoStreams):
    """The fork event is missing: the scale's buffer is written while the call before may still read it."""

    def fork(self, main: torch.cuda.Stream) -> None:
        pass


class JoinedOutside(TwoStreams):
    """The matmul has a side stream of its own as well, so that the join needs two events: one for each end."""

    def __init__(self) -> None:
        super().__init__()
        self._product: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._product is None:
            self._matmul_side, self._matmul_end = torch.cuda.Stream(x.device), torch.cuda.Event()
            self._product = torch.empty(x.shape[0], weight.shape[0], device=x.device, dtype=torch.float32)
        return super().__call__(x, weight, eps)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        self._matmul_side.wait_event(self._fork)
        with torch.cuda.stream(self._matmul_side):
            self._product.copy_(_wide_product(x, weight))
            self._matmul_end.record(self._matmul_side)
        return self._product

    def join(self, main: torch.cuda.Stream) -> None:
        self.join_matmul(main)
        self.join_squares(main)

    def join_matmul(self, main: torch.cuda.Stream) -> None:
        main.wait_event(self._matmul_end)

    def join_squares(self, main: torch.cuda.Stream) -> None:
        main.wait_event(self._join)


class MissingMatmulEnd(JoinedOutside):
    """The join waits for the sum of squares alone: the scale multiplies what the call before left in the product."""

    def join_matmul(self, main: torch.cuda.Stream) -> None:
        pass


class MissingSquaresEnd(JoinedOutside):
    """The join waits for the matmul alone: the product is multiplied by the scale of the call before."""

    def join_squares(self, main: torch.cuda.Stream) -> None:
        pass


class BothJoinedAfterwards(JoinedOutside):
    """Both waits come when the result is made already: of the product and of the scale of the call before."""

    def join(self, main: torch.cuda.Stream) -> None:
        pass

    def leave(self, main: torch.cuda.Stream) -> None:
        super().join(main)


class SharedEvent(TwoStreams):
    """The wait is queued before this call's record: the event still holds the record of the call before."""

    def fork(self, main: torch.cuda.Stream) -> None:
        super().fork(main)
        main.wait_event(self._join)

    def join(self, main: torch.cuda.Stream) -> None:
        pass


class EarlyReuse(TwoStreams):
    """The side stream waits for an event that the call before recorded before it used the buffer."""

    _early = None

    def fork(self, main: torch.cuda.Stream) -> None:
        if self._early is not None:
            self._side.wait_event(self._early)

    def join(self, main: torch.cuda.Stream) -> None:
        self._early = torch.cuda.Event()
        self._early.record(main)
        super().join(main)


def freed_early(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The shipped operation without `record_stream`: the scale's memory goes back while the main stream reads it."""
    main, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
    fork, join = torch.cuda.Event(), torch.cuda.Event()
    fork.record(main)
    side.wait_event(fork)
    with torch.cuda.stream(side):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        join.record(side)
    product = _wide_product(x, weight)
    main.wait_event(join)
    return (product * scale).to(x.dtype)


FAULTS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "implicit join": ImplicitJoin,
    "the join after the result": JoinedAfterwards,
    "both joins after the result": BothJoinedAfterwards,
    "the matmul's end event missing": MissingMatmulEnd,
    "the sum of squares' end event missing": MissingSquaresEnd,
    "the fork event missing": MissingFork,
    "event shared between calls": SharedEvent,
    "buffer reused one step early": EarlyReuse,
    "memory freed early": lambda: freed_early,
}
