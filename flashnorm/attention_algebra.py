"""Scalars and gains on the way from a projection to an attention score, as pure functions; conventions as in `algebra`.

Notation. A head's query and key are q and k, (..., D) each. Rotary embedding turns 2R of their channels in R pairs:
pair j is channels (j, j + R), or (2j, 2j + 1) where it is interleaved. R(m) is the turn by the angles of position m;
channels beyond 2R stay as they are. A score is ⟨R(m) q, R(n) k⟩.

    carry     R(m) (s q) = (s R(m)) q                                    `scaled_rotation`
    tables    R(m) (g ⊙ q) = (R(m) diag(g)) q                            `gain_tables`, `turn`
    share     ⟨R(m) (a ⊙ q), R(n) (b ⊙ k)⟩ = ⟨R(m) (a ⊙ b ⊙ q), R(n) k⟩  `shared_gains`

The first holds for every scalar s of a token, such as the 1 / r(x) of a norm that was deferred. The last one holds
where diag(b) and the turn commute: on channels that do not turn, and on pairs of which both channels have one gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm.errors import ShapeError


def partners(rotary: int, *, interleaved: bool) -> Tensor:
    """(2R,) int64: the channel that each turning channel is mixed with."""
    channel = torch.arange(2 * rotary)
    return channel ^ 1 if interleaved else (channel + rotary) % max(1, 2 * rotary)


def scaled_rotation(cos: Tensor, sin: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(s cos, s sin): tables that turn a head and multiply its turning channels by s at once.

    Channels beyond 2R see no table, so s has to reach them, and the values, in another way.

    `cos`, `sin`: (..., R) at the tokens' positions. `scale`: (..., 1). Returns their dtype, or a wider one of `scale`.
    """
    return cos * scale, sin * scale


def gain_tables(cos: Tensor, sin: Tensor, gain: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(own, other): what `turn` multiplies each turning channel and its partner by, a gain before the turn included.

        own_i = g_i cos_i,   other_i = ∓ g_p(i) sin_i,   minus in the first channel of a pair

    The two channels of a pair have gains of their own, so that a table is 2R wide where `cos` is R wide, and each gain
    needs tables of its own.

    `cos`, `sin`: (..., R). `gain`: (D,), D ≥ 2R. Returns two of (..., 2R). Raises `ShapeError` if `gain` is too short.
    """
    rotary = cos.shape[-1]
    if gain.ndim != 1 or len(gain) < 2 * rotary:
        raise ShapeError(f"a gain of shape {tuple(gain.shape)} does not cover {2 * rotary} turning channels")
    own = gain[: 2 * rotary].to(cos.dtype)
    wide_cos, wide_sin = (_by_channel(table, interleaved) for table in (cos, sin))
    first = partners(rotary, interleaved=interleaved) > torch.arange(2 * rotary)
    signed = torch.where(first.to(sin.device), -wide_sin, wide_sin)
    return wide_cos * own, signed * own[partners(rotary, interleaved=interleaved).to(own.device)]


def turn(x: Tensor, own: Tensor, other: Tensor, *, interleaved: bool) -> Tensor:
    """own ⊙ x + other ⊙ (x with the channels of each pair exchanged), on the first 2R channels; the rest stays.

    `x`: (..., D). `own`, `other`: (..., 2R), of `gain_tables`. Returns the shape of `x`.
    """
    turning = own.shape[-1]
    exchanged = x[..., partners(turning // 2, interleaved=interleaved).to(x.device)]
    return torch.cat((own * x[..., :turning] + other * exchanged, x[..., turning:]), -1)


def shared_gains(q_gain: Tensor, k_gain: Tensor, rotary: int, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(a', b') with the same scores, in which b' is 1 on all channels whose gain the query can take over.

    Those are the channels beyond 2R, and the pairs of which both channels have the same `k_gain`: there
    a' = a ⊙ b. On the others a' = a and b' = b.

    `q_gain`, `k_gain`: (D,), D ≥ 2R. Returns (D,) twice. Raises `ShapeError` where they do not fit.
    """
    if q_gain.shape != k_gain.shape or k_gain.ndim != 1 or len(k_gain) < 2 * rotary:
        raise ShapeError(
            f"gains of shape {tuple(q_gain.shape)} and {tuple(k_gain.shape)} do not fit {2 * rotary} turning channels"
        )
    moves = torch.ones_like(k_gain, dtype=torch.bool)
    turning = k_gain[: 2 * rotary]
    moves[: 2 * rotary] = turning == turning[partners(rotary, interleaved=interleaved).to(k_gain.device)]
    return torch.where(moves, q_gain * k_gain, q_gain), torch.where(moves, 1.0, k_gain)


def _by_channel(table: Tensor, interleaved: bool) -> Tensor:
    """(..., R), a number for each pair, as (..., 2R), a number for each channel."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
