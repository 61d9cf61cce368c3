"""The counts against the multiplications that both forms of each identity really do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flashnorm import algebra, attention_algebra
from flashnorm.bench import scalars
from flashnorm.bench.scalars import MOVES, Sizes
from flashnorm.kernels.decode.reference import rotate

# No two of these are equal, nor are their products; heads of the second turn in part.
SIZES = [Sizes(40, 112, 6, 2, 16, 8), Sizes(24, 56, 4, 2, 10, 3)]


class _Products(TorchDispatchMode):
    """Counts the elements that multiplications give; those of matmuls are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mul.Tensor, torch.ops.aten.pow.Tensor_Scalar):
            self.count += result.numel()
        return result


def products(compute: Callable[[], object]) -> int:
    with _Products() as counted:
        compute()
    return counted.count


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def heads(s: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of one token, and its tables."""
    return drawn(s.turned, s.head_dim), drawn(2, s.rotary)


def glu(s: Sizes, activation, degree):
    gate, up, scale, down = drawn(1, s.inner), drawn(1, s.inner), drawn(1, 1).abs(), drawn(s.hidden, s.inner)

    def moved():
        h, t = algebra.defer_glu_scale(gate, up, scale, activation, degree)
        return t * F.linear(h, down)

    return lambda: F.linear(activation(scale * gate) * (scale * up), down), moved


def rotation(s: Sizes):
    (qk, (cos, sin)), v, scale = heads(s), drawn(s.kv_heads, s.head_dim), drawn(1, 1).abs()

    def plain():
        return rotate(qk * scale, cos, sin, interleaved=False), v * scale

    def moved():
        turning, rest = qk[:, : 2 * s.rotary], qk[:, 2 * s.rotary :]
        tables = (table[0] for table in attention_algebra.scaled_rotation(cos[None], sin[None], scale))
        return rotate(turning, *tables, interleaved=False), rest * scale, v * scale

    return plain, moved


def swallowed(s: Sizes):
    (qk, _), v, scale, eps = heads(s), drawn(s.kv_heads, s.head_dim), drawn(1, 1).abs(), drawn(1).abs()
    return (
        lambda: (algebra.rms_norm(qk * scale, 1e-6), v * scale),
        lambda: (algebra.rms_norm(qk, eps * (scale.reciprocal() ** 2)[0]), v * scale),
    )


def tables(s: Sizes):
    (qk, (cos, sin)), gain = heads(s), drawn(s.head_dim)
    own, other = attention_algebra.gain_tables(cos, sin, gain, interleaved=False)  # made once for a model

    def moved():
        turned = attention_algebra.turn(qk[:, : 2 * s.rotary], own, other, interleaved=False)
        return turned, qk[:, 2 * s.rotary :] * gain[2 * s.rotary :]

    return lambda: rotate(qk * gain, cos, sin, interleaved=False), moved


def shared(s: Sizes):
    qk, gain = drawn(s.turned, s.head_dim), drawn(s.head_dim)
    return lambda: qk * gain, lambda: qk[: s.heads] * gain


FORMS = {
    scalars.glu: lambda s: glu(s, torch.tanh, None),
    scalars.homogeneous_glu: lambda s: glu(s, torch.relu, 1),
    scalars.rotation: rotation,
    scalars.swallowed: swallowed,
    scalars.tables: tables,
    scalars.shared: shared,
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_as_many_products_are_saved_as_counted(move, sizes):
    plain, moved = (products(form) for form in FORMS[move](sizes))
    assert plain - moved == move(sizes).saved.products


def test_the_count_sees_one_product_more():
    gain = drawn(4)
    assert products(lambda: gain * gain) == 4
    assert products(lambda: gain * gain * gain) == 8
    assert products(lambda: gain @ gain) == 0


def test_bytes_are_those_of_the_tensors():
    s = SIZES[0]
    plain, gain, layers = drawn(2, s.rotary).float(), drawn(s.head_dim).float(), 2
    own = [attention_algebra.gain_tables(*plain, gain, interleaved=False) for _ in range(layers)]  # of q and of k
    counted = scalars.tables(s)
    assert counted.plain.bytes == plain.nbytes + 2 * gain.nbytes
    assert counted.moved.bytes == counted.moved.memory == sum(t.nbytes for pair in own for t in pair)
    assert scalars.shared(s).saved.bytes == gain.nbytes


def test_weights_of_a_layer():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=10, vocab_size=8,
    )  # fmt: skip
    layer = LlamaForCausalLM(config).model.layers[0]
    assert Sizes.of(config) == Sizes(24, 56, 4, 2, 10, 5)
    assert Sizes.of(config).weights == sum(p.numel() for p in layer.parameters() if p.ndim == 2)
