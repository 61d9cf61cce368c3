"""What moving a scalar or a gain to another place would save in a decode step: counted, for one token in one layer.

Counted are multiplications by a scalar, a gain or a number of a table, done in registers or not, and the bytes of all
of these that a kernel has to fetch or to pass on, gains and scalars in fp32 as the decode kernels take them. Not
counted is what both forms do alike: the products with weights, the turn itself, the activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_FP32 = 4
_HANDED_ON = 2 * _FP32  # a scalar that another kernel uses is written once and read once


@dataclass(frozen=True)
class Sizes:
    """One decoder layer. `rotary`: half the channels of a head that turn, as everywhere."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """Of a Transformers config whose heads turn on all channels."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return cls(config.hidden_size, config.intermediate_size, heads, kv_heads, head_dim, head_dim // 2)

    @property
    def turned(self) -> int:
        """Heads that turn: those of queries and keys."""
        return self.heads + self.kv_heads

    @property
    def projected(self) -> int:
        """Outputs of the three projections."""
        return (self.turned + self.kv_heads) * self.head_dim

    @property
    def weights(self) -> int:
        """Elements of all weights of a layer with a gated MLP: as many multiplications, and twice the bytes in bf16."""
        return self.hidden * (self.projected + self.heads * self.head_dim + 3 * self.inner)


@dataclass(frozen=True)
class Count:
    """Multiplications, and bytes fetched or passed on. `memory`: bytes for each position of the context, held."""

    products: int
    bytes: int
    memory: int = 0


@dataclass(frozen=True)
class Move:
    """One identity: what it costs as it stands in the plain form, and moved."""

    name: str
    plain: Count
    moved: Count

    @property
    def saved(self) -> Count:
        """Negative where moving costs more."""
        p, m = self.plain, self.moved
        return Count(p.products - m.products, p.bytes - m.bytes, p.memory - m.memory)


def glu(s: Sizes) -> Move:
    """act(s a) ⊙ (s b): the up side's scalar moved to the output of the down projection; the gate needs its own."""
    return Move("GLU, gate needs the scalar", Count(2 * s.inner, 0), Count(s.inner + s.hidden, _HANDED_ON))


def homogeneous_glu(s: Sizes) -> Move:
    """The same with an activation of degree d: one power of s, s^(d+1), at the output of the down projection."""
    return Move("GLU, were it homogeneous", Count(2 * s.inner, 0), Count(1 + s.hidden, _HANDED_ON))


def rotation(s: Sizes) -> Move:
    """The scalar of q and k in cos and sin, that of channels that do not turn and of v at the cache write."""
    rest = s.turned * (s.head_dim - 2 * s.rotary) + s.kv_heads * s.head_dim
    return Move("RMS in cos and sin", Count(s.projected, 0), Count(2 * s.rotary + rest, _HANDED_ON))


def swallowed(s: Sizes) -> Move:
    """QK-norm makes the scalar of q and k void, with eps · r² as its epsilon; v keeps it."""
    return Move("RMS swallowed by QK-norm", Count(s.projected, 0), Count(s.kv_heads * s.head_dim + 2, _HANDED_ON))


def tables(s: Sizes) -> Move:
    """QK-norm gains in tables of the layer's own: two of q and two of k, a number for each turning channel.

    The plain form's cos and sin, a number for each pair, are shared by all layers, so that only the moved form's tables
    are held for each.
    """
    rest = s.head_dim - 2 * s.rotary
    shared, own = 2 * s.rotary * _FP32, 2 * 2 * 2 * s.rotary * _FP32
    plain = Count(s.turned * s.head_dim, 2 * s.head_dim * _FP32 + shared)
    return Move("QK-norm gains in cos and sin", plain, Count(s.turned * rest, 2 * rest * _FP32 + own, own))


def shared(s: Sizes) -> Move:
    """One gain gQ · gK on the queries of a layer without rotation (`attention_algebra.shared_gains`)."""
    plain = Count(s.turned * s.head_dim, 2 * s.head_dim * _FP32)
    return Move("gQ · gK without rotation", plain, Count(s.heads * s.head_dim, s.head_dim * _FP32))


MOVES = (glu, homogeneous_glu, rotation, swallowed, tables, shared)
