"""The mathematics of `flashnorm`: every identity that a fold, a fused kernel or a check relies on, as pure functions.

Notation, for one token x of width K and a linear (W: (N, K), c: (N,)) that reads it:

    r(x) = sqrt(mean(x²) + eps)            the RMS: one number per token
    n(x) = x / r(x)                        the norm without its gain
    RMSNorm(x) = g ⊙ n(x)                  LayerNorm(x) = g ⊙ n(x − mean(x)) + b

    fold      W (g ⊙ n) = (W diag(g)) n                         `fold_gain`
    shift     W (g ⊙ n + b) + c = (W diag(g)) n + (c + W b)     `fold_shift`
    defer     W n(x) + c = (W x) / r(x) + c                     `deferred_linear`
    cancel    n₂(W n₁(x)) = n₂(W x), with another epsilon       `carried_epsilon`
    center    W x − mean(W x) = (W − mean of its rows) x        `center`
    GLU       act(s a) ⊙ (s b) = s^(d+1) act(a) ⊙ b             `defer_glu_scale`
    LoRA      (W + B A) diag(g) = W diag(g) + B (A diag(g))      `fold_lora`, `lora_shift`

Those of scalars and gains between a projection and an attention score are in `attention_algebra`.

Fold and defer are those of FlashNorm (Graef et al., arXiv:2407.09577); the epsilon of `carried_epsilon` makes its
cancellation exact.

Conventions. Nothing is changed in place. Arithmetic is in fp32, or in fp64 where an operand is fp64, and rounded once,
to the dtype of the first argument; per-token scalars are returned unrounded, because the scalar of a bf16 row is not
a bf16 number. The width of an activation is its last axis, any number of axes may precede it. An epsilon is a number
or a tensor of shape (..., 1), and sits inside the square root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor

from flashnorm.errors import Refusal, ShapeError


class ZeroGainError(Refusal):
    """A gain is zero where it has to be divided by. `channels`: the gain's channels at which it is."""

    def __init__(self, channels: list[int]) -> None:
        self.channels = channels
        shown = ", ".join(map(str, channels[:8])) + (f" and {len(channels) - 8} more" if len(channels) > 8 else "")
        super().__init__(f"the gain is zero at channel {shown} and cannot be divided out; use the unfolded original")


def _wide(*operands: Tensor) -> torch.dtype:
    """The dtype to compute in: fp32, or fp64 when an operand is."""
    return reduce(torch.promote_types, (t.dtype for t in operands), torch.float32)


# ---------------------------------------------------------------------------------------------------------------
# The norm without its gain
# ---------------------------------------------------------------------------------------------------------------


def mean_square(x: Tensor) -> Tensor:
    """mean(x²) over the last axis. `x`: (..., K). Returns (..., 1), fp32 or fp64."""
    return x.to(_wide(x)).square().mean(-1, keepdim=True)


def rms(x: Tensor, eps: float | Tensor) -> Tensor:
    """r(x) = sqrt(mean(x²) + eps). `x`: (..., K). Returns (..., 1), fp32 or fp64."""
    return (mean_square(x) + eps).sqrt()


def rms_norm(x: Tensor, eps: float | Tensor) -> Tensor:
    """n(x) = x / r(x), RMSNorm without its gain. `x`: (..., K). Returns the same shape and dtype."""
    return (x.to(_wide(x)) / rms(x, eps)).to(x.dtype)


def layer_norm_core(x: Tensor, eps: float | Tensor) -> Tensor:
    """n(x − mean(x)), LayerNorm without its gain and bias. `x`: (..., K). Returns the same shape and dtype."""
    return rms_norm(center(x.to(_wide(x))), eps).to(x.dtype)


def gain_of(weight: Tensor, offset: float = 0.0) -> Tensor:
    """g = offset + w: what a norm multiplies by, given its stored weight (offset 0: plain, 1: one-plus).

    `weight`: (K,). Returns (K,) in fp32 or fp64, because 1 + w in bf16 would lose the low bits of w.
    """
    return weight.to(_wide(weight)) + offset


# ---------------------------------------------------------------------------------------------------------------
# Fold: the gain and the bias of a norm move into the weights that read it
# ---------------------------------------------------------------------------------------------------------------


def spread(values: Tensor, channels: Tensor | None, rest: float) -> Tensor:
    """A norm's per-channel values laid out along the axis of a weight that reads the norm.

    `values`: (K,). `channels`: None for the identity map, else (L,) integers: position i takes `values[channels[i]]`,
    or `rest` where `channels[i]` is −1 (a position that does not read the norm). Returns (K,) or (L,).
    Raises `ShapeError` if a channel does not exist.
    """
    if channels is None:
        return values
    if channels.numel() and (int(channels.max()) >= len(values) or int(channels.min()) < -1):
        raise ShapeError(f"channels must lie in -1..{len(values) - 1}, not {channels.min()}..{channels.max()}")
    return torch.where(channels >= 0, values[channels.clamp(min=0)], rest)


def gain_factor(weight: Tensor, offset: float = 0.0, channels: Tensor | None = None) -> Tensor:
    """What a norm's stored weight multiplies the axis of its reader by: `gain_of`, laid out by `spread`.

    `weight`: (K,), or of any shape with K elements. Returns (K,), or (L,) with `channels`, in fp32 or fp64.
    """
    return spread(gain_of(weight.reshape(-1), offset), channels, rest=1.0)


def least_channels(channels: Tensor, width: int) -> Tensor | None:
    """`channels` as `spread` takes them, with None in place of the identity map of a norm of `width` channels."""
    return None if channels.equal(torch.arange(width, dtype=channels.dtype, device=channels.device)) else channels


def product_dtype(weight: torch.dtype, factors: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which a weight is multiplied by several factors, so that only storing the result rounds it.

    fp32, or fp64 where an operand is; fp64 as well where an fp32 weight takes more than one factor, because the product
    of the first would be rounded to fp32 and that of the second again.
    """
    dtypes = tuple(factors)
    twice_rounded = weight == torch.float32 and len(dtypes) > 1
    return torch.float64 if twice_rounded else reduce(torch.promote_types, (weight, *dtypes), torch.float32)


def _along(weight: Tensor, values: Tensor, axis: int, channels: Tensor | None, rest: float) -> Tensor:
    """`spread`, checked against the axis of `weight` that it is for, in the dtype to compute in."""
    if not weight.is_floating_point():
        raise Refusal(f"a weight of dtype {weight.dtype} holds codes, not numbers; dequantise it first")
    along = spread(values.to(_wide(weight, values)), channels, rest)
    if along.shape != (weight.shape[axis],):
        raise ShapeError(
            f"per-channel values of shape {tuple(along.shape)} do not fit axis {axis} of a weight {tuple(weight.shape)}"
        )
    return along


def _factor(weight: Tensor, gain: Tensor, axis: int, channels: Tensor | None) -> Tensor:
    """The gain as a factor that broadcasts against `weight` along `axis` and nowhere else."""
    shape = [1] * weight.ndim
    shape[axis] = -1
    return _along(weight, gain, axis, channels, rest=1.0).reshape(shape)


def fold_gain(weight: Tensor, gain: Tensor, axis: int = -1, channels: Tensor | None = None) -> Tensor:
    """W diag(g): multiplies `weight` by the gain along the axis that reads the norm, so that the norm needs none.

        W (g ⊙ n) = (W diag(g)) n

    `weight`: any shape, e.g. (N, K) with axis −1, (K, N) stored transposed with axis 0, (E, N, K) stacked experts.
    `gain`: (K,). `channels`: see `spread`. Returns the shape and dtype of `weight`.
    Raises `ShapeError` if the gain does not fit the axis.
    """
    factor = _factor(weight, gain, axis, channels)
    return (weight.to(factor.dtype) * factor).to(weight.dtype)


def fold_gains(weight: Tensor, factors: Sequence[tuple[int, Tensor]]) -> Tensor:
    """`fold_gain` with a factor for each of several axes at once, rounded once.

    `factors`: (axis, 1-D tensor as long as that axis) each. Returns the shape and dtype of `weight`.
    Raises `ShapeError` if a factor does not fit its axis.
    """
    product = weight.to(product_dtype(weight.dtype, (factor.dtype for _, factor in factors)))
    for axis, factor in factors:
        product = product * _factor(weight, factor, axis, None)
    return product.to(weight.dtype)


def unfold_gain(weight: Tensor, gain: Tensor, axis: int = -1, channels: Tensor | None = None) -> Tensor:
    """W diag(g)⁻¹, the inverse of `fold_gain` with the same arguments.

    Raises `ZeroGainError` if a gain that `weight` reads is zero, and `ShapeError` as `fold_gain` does.
    """
    factor = _factor(weight, gain, axis, channels)
    _refuse_zeros(gain, channels)
    return (weight.to(factor.dtype) / factor).to(weight.dtype)


def fold_shift(
    weight: Tensor, shift: Tensor, bias: Tensor | None = None, axis: int = -1, channels: Tensor | None = None
) -> Tensor:
    """c + W b: the bias of the linear after the bias b of the norm before it has moved in.

        W (g ⊙ n + b) + c = (W diag(g)) n + (c + W b)

    `weight`: as for `fold_gain`, *before* the gain is folded into it. `shift`: (K,), the norm's bias. `bias`: the
    shape of `weight` without `axis`; None stands for a linear without one. Returns that shape, in the dtype of `bias`
    (of `weight` if there is none). Raises `ShapeError` if the operands do not fit.
    """
    along = _along(weight, shift, axis, channels, rest=0.0)
    moved = torch.tensordot(weight.to(along.dtype), along, dims=([axis], [0]))
    if bias is None:
        return moved.to(weight.dtype)
    if bias.shape != moved.shape:
        raise ShapeError(f"a bias of shape {tuple(bias.shape)} does not fit a linear with outputs {tuple(moved.shape)}")
    return (bias.to(_wide(bias, moved)) + moved).to(bias.dtype)


def kept_shift(shift: Tensor, gain: Tensor) -> Tensor:
    """b / g: the bias that a norm must have instead of b once its gain has moved behind it and its bias has not.

        g ⊙ n + b = g ⊙ (n + b / g)

    `shift`, `gain`: (K,). Returns (K,) in the dtype of `shift`. Raises `ZeroGainError` if a gain is zero.
    """
    return unfold_gain(shift, gain)


def _refuse_zeros(gain: Tensor, channels: Tensor | None) -> None:
    read = gain == 0
    if channels is not None:
        read = read & torch.isin(torch.arange(len(gain), device=gain.device), channels)
    if read.any():
        raise ZeroGainError(read.nonzero().flatten().tolist())


# ---------------------------------------------------------------------------------------------------------------
# Defer and cancel: the scalar of a norm moves behind the linear, or away
# ---------------------------------------------------------------------------------------------------------------


def deferred_linear(x: Tensor, weight: Tensor, eps: float | Tensor, bias: Tensor | None = None) -> Tensor:
    """y = (W x) / r(x) + c: a linear after a norm without gain, with the norm's scalar taken after the product.

        W n(x) + c = (W x) / r(x) + c

    The scalar divides the product only: the bias is added after it. `x`: (..., K). `weight`: (N, K). `bias`: (N,).
    Returns (..., N) in the dtype of `x`.
    """
    wide = _wide(x, weight)
    product = x.to(wide) @ weight.to(wide).mT / rms(x, eps)
    return (product if bias is None else product + bias).to(x.dtype)


def carried_epsilon(x: Tensor, eps1: float | Tensor, eps2: float | Tensor, degree: int = 1) -> Tensor:
    """eps2 · r₁(x)^(2 degree): the epsilon with which a second norm makes the norm before its linear redundant.

    With y = W x, and W free of bias, the linear gives u = y / r₁(x), and

        n₂(u) = (y / r₁) / sqrt(mean(y²) / r₁² + eps2) = y / sqrt(mean(y²) + eps2 · (mean(x²) + eps1))

    so `rms_norm(W n₁(x), eps2) = rms_norm(W x, carried_epsilon(x, eps1, eps2))`, exactly. With eps2 in its place the
    two agree only while mean(y²) is far above eps2; right after an embedding it is not. The same holds for
    `layer_norm_core` as the second norm, and for a LayerNorm core as the first when `x` is centered.

    With any f in the place of W for which f(s x) = s^d f(x), s > 0, the same holds with `degree` d: 1 for W₂ relu(W x),
    2 for W₂ relu²(W x), 3 for W₂ (relu²(V x) ⊙ W x).

    `x`: (..., K). Returns (..., 1), fp32 or fp64. Insert an axis before it to use it with a norm over single heads.
    """
    return eps2 * (mean_square(x) + eps1) ** degree


def dropped_epsilon_error(y_mean_square: Tensor, r1_square: Tensor, eps2: float | Tensor) -> Tensor:
    """|sqrt((m + eps2 s) / (m + eps2)) − 1|: the relative error of a second norm that keeps its own epsilon.

        y / sqrt(m + eps2) = sqrt((m + eps2 s) / (m + eps2)) · y / sqrt(m + eps2 s),   m = mean(y²),   s = r₁(x)²

    of which the last factor is exact (`carried_epsilon`). It falls as m grows, and as s comes nearer to one from either
    side; so over all tokens with m >= a and b <= s <= c it is at most the larger of its values at (a, b) and (a, c).

    All of one shape, or such that they broadcast. Returns that shape, fp32 or fp64.
    """
    wide = _wide(y_mean_square, r1_square)
    m, s = y_mean_square.to(wide), r1_square.to(wide)
    return (((m + eps2 * s) / (m + eps2)).sqrt() - 1).abs()


# ---------------------------------------------------------------------------------------------------------------
# Center: LayerNorm's mean subtraction moves into what comes before
# ---------------------------------------------------------------------------------------------------------------


def center(x: Tensor, axis: int = -1) -> Tensor:
    """x − mean(x) along `axis`; of a weight, along its output axis: the linear that produces centered activations.

        y − mean(y) = (W − 1 wᵀ) z + (c − mean(c)),    y = W z + c,   w = mean of W's rows

    So if everything that is added to a residual stream is centered along the stream's axis, the stream's mean is zero
    and a LayerNorm that reads it is an RMSNorm: a linear (N, K) along axis 0, its bias along axis 0, an embedding
    table (V, N) along axis 1. Along the *input* axis of a linear the same operation absorbs the mean of what it reads:

        W (x − mean(x)) = (W − v 1ᵀ) x,    v = mean of W's columns

    Returns the shape and dtype of `x`.
    """
    wide = x.to(_wide(x))
    return (wide - wide.mean(axis, keepdim=True)).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------
# GLU: how far a per-token scalar may move through an activation
# ---------------------------------------------------------------------------------------------------------------

# Degree d of homogeneity, act(s z) = s^d act(z) for s > 0, by the activation's name in Transformers. An activation
# that is not listed is not homogeneous (SiLU, GELU, ...) or not known to be.
HOMOGENEITY: Mapping[str, int] = MappingProxyType({"linear": 1, "relu": 1, "leaky_relu": 1, "prelu": 1, "relu2": 2})


def defer_glu_scale(
    gate: Tensor, up: Tensor, scale: Tensor, activation: Callable[[Tensor], Tensor], degree: int | None
) -> tuple[Tensor, Tensor]:
    """(h, t) with act(s · gate) ⊙ (s · up) = t · h, and t as much of the scalar s as may be taken after the product.

        homogeneous of degree d:   t = s^(d+1),   h = act(gate) ⊙ up
        any other activation:      t = s,         h = act(s · gate) ⊙ up

    The up side is linear and always lets s through; the gate side only if the activation does. t is a per-token
    scalar, so it passes through the down projection too: W_down (t · h) = t · (W_down h).

    `gate`, `up`: (..., F), from the un-normed input. `scale`: (..., 1), positive: 1 / r(x). `degree`: from
    `HOMOGENEITY`, None if there is none. Returns h: (..., F) in the dtype of `gate`, and t: (..., 1), fp32 or fp64.
    """
    wide = _wide(gate, up, scale)
    gate_wide, up_wide, s = gate.to(wide), up.to(wide), scale.to(wide)
    if degree is None:
        return (activation(s * gate_wide) * up_wide).to(gate.dtype), s
    return (activation(gate_wide) * up_wide).to(gate.dtype), s ** (degree + 1)


# ---------------------------------------------------------------------------------------------------------------
# LoRA: an adapter follows the weight that it adapts
# ---------------------------------------------------------------------------------------------------------------


def fold_lora(
    lora_a: Tensor, lora_b: Tensor, gain: Tensor, axis: int = -1, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The adapter (A', B') that does on a folded weight what (A, B) does on the original W, in W + s B A.

        the gain scales W's input axis (axis 1 or −1):   (W + s B A) diag(g) = W diag(g) + s B (A diag(g))
        the gain scales W's output axis (axis 0 or −2):  diag(g) (W + s B A) = diag(g) W + s (diag(g) B) A

    `lora_a`: (..., R, K). `lora_b`: (..., N, R). `axis`: of W as (N, K), the orientation of B A, however W is stored.
    `gain`, `channels`: as for `fold_gain` on W. Returns new A and B of the same shapes and dtypes.
    Raises `ShapeError` if the gain does not fit the axis.
    """
    if _reads_input(axis):
        return fold_gain(lora_a, gain, -1, channels), lora_b
    return lora_a, fold_gain(lora_b, gain, -2, channels)


def unfold_lora(
    lora_a: Tensor, lora_b: Tensor, gain: Tensor, axis: int = -1, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The inverse of `fold_lora`: an adapter trained on the folded weight, made one for the original.

    Raises `ZeroGainError` if a gain that the weight reads is zero: the adapter may use an input that the original
    weight never sees. Raises `ShapeError` as `fold_lora` does.
    """
    if _reads_input(axis):
        return unfold_gain(lora_a, gain, -1, channels), lora_b
    return lora_a, unfold_gain(lora_b, gain, -2, channels)


def lora_shift(lora_a: Tensor, lora_b: Tensor, shift: Tensor, channels: Tensor | None = None) -> Tensor:
    """B A b: what the adapter (A, B) of the original W lacks once the norm's bias b has moved into the next bias.

        (W + s B A) (g ⊙ n + b) + c = (W + s B A) diag(g) n + (c + W b) + s B A b

    `lora_a`: (R, K). `lora_b`: (N, R). `shift`, `channels`: as for `fold_shift` on W. Returns (N,) in the dtype of
    `lora_b`, to be added before the scaling s. Raises `ShapeError` as `fold_shift` does.
    """
    wide = _wide(lora_a, lora_b, shift)
    return (lora_b.to(wide) @ fold_shift(lora_a.to(wide), shift, channels=channels)).to(lora_b.dtype)


def _reads_input(axis: int) -> bool:
    if axis not in (-2, -1, 0, 1):
        raise ShapeError(f"an adapted weight has an output axis 0 and an input axis 1, no axis {axis}")
    return axis in (-1, 1)
