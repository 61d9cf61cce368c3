"""How the tokens that one norm is called on lie in what another norm is called with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch


@dataclass(frozen=True)
class Arrangement:
    """How the tokens of a dropped norm lie in the leading axes of what another norm is called with.

    Token axis i of the dropped norm is axis `positions[i]` of `rank` leading axes; `flat`: its token axes count as one.
    """

    rank: int
    positions: tuple[int, ...]
    flat: bool = False

    def spread(self, scalar: torch.Tensor) -> torch.Tensor:
        """A scalar (tokens..., 1) with axes that broadcast against (leading axes..., width)."""
        tokens = scalar.flatten(0, -2) if self.flat else scalar
        order = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        tokens = tokens.permute(*order, tokens.ndim - 1)
        for position in range(self.rank):
            if position not in self.positions:
                tokens = tokens.unsqueeze(position)
        return tokens


def arrangement_of(index: torch.Tensor, tokens: torch.Size) -> Arrangement | None:
    """The arrangement in which element [..., i, ...] of `index` is the number of the token, in the order of `tokens`.

    `index`: the leading axes of a norm's input. None where there is none, or more than one: an axis of length one lies
    anywhere.
    """
    for flat in (False, True) if len(tokens) > 1 else (False,):
        shape = torch.Size([tokens.numel()]) if flat else tokens
        numbers = torch.arange(tokens.numel()).view(*shape, 1)
        fits = []
        for positions in permutations(range(index.ndim), len(shape)):
            if any(index.shape[p] != n for p, n in zip(positions, shape, strict=True)):
                continue
            candidate = Arrangement(index.ndim, positions)
            if torch.equal(candidate.spread(numbers)[..., 0].expand(index.shape), index):
                fits.append(Arrangement(index.ndim, positions, flat))
        if 1 in tokens or len(fits) > 1:
            return None
        if fits:
            return fits[0]
    return None
