"""The identities of `flashnorm.algebra`, as properties in fp64.

Every identity is checked by `assert_same`, to 1e-12 of the terms that its formula adds up. That is no tuned figure: the
longest sum here has 9 terms and no formula does more than some twenty roundings of 2^-53, so honest arithmetic stays
below 1e-14. The last part plants the known wrong formulas and sees the same assertion catch each of them.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers.activations import ACT2FN

from flashnorm import algebra
from flashnorm.errors import Refusal

RELATIVE = 1e-12


def holds_for(*strategies):
    """A property test of 40 examples; no deadline, because a busy machine is not a wrong formula."""
    return lambda test: settings(max_examples=40, deadline=None)(given(*strategies)(test))


def assert_same(actual, expected, terms):
    """|actual - expected| <= 1e-12 * terms, where `terms` is the sum of the absolute values that were added up.

    The smallest normal number is added because a product that underflows has lost its relative precision.
    """
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert expected.isfinite().all()
    excess = (actual - expected).abs() - (RELATIVE * terms + torch.finfo(torch.float64).tiny)
    assert (excess <= 0).all(), f"differs by {(actual - expected).abs().max():.3g}"


def normalized_terms(terms, values, r):
    """The terms of values / r, given those of values: an error in the row reaches the result through r as well."""
    return terms / r + (values / r).abs() * terms.square().mean(-1, keepdim=True).sqrt() / r


# Zero, or of either sign and at most six decades wide: what underflows does so through the row scales below.
magnitudes = st.floats(1e-3, 1e3)
numbers = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda v: -v))
nonzero = st.one_of(magnitudes, magnitudes.map(lambda v: -v))
widths = st.integers(1, 9)  # odd widths and width 1 included
epsilons = st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3])
row_scales = st.sampled_from([0.0, 1e-160, 1e-8, 1e-3, 1.0, 1e4])  # zero rows; rows whose mean square is below eps


def tensors(shape, elements=numbers):
    return arrays("float64", shape, elements=elements, fill=st.nothing()).map(torch.from_numpy)


@st.composite
def activations(draw, width):
    """(..., width) with none to three leading axes, every row at a scale of its own."""
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    return draw(tensors((*lead, width))) * draw(tensors((*lead, 1), row_scales))


@st.composite
def channel_maps(draw, width):
    """None, or a map of an axis of any length onto `width` channels, -1 and repetitions included."""
    entries = st.lists(st.integers(-1, width - 1), min_size=1, max_size=9)
    return draw(st.one_of(st.none(), entries.map(torch.tensor)))


def read(values, channels, rest):
    """What a weight's axis sees of a norm's channels, spelled out one position at a time."""
    if channels is None:
        return values
    return torch.stack([values[..., c] if c >= 0 else torch.full_like(values[..., 0], rest) for c in channels], -1)


# --------------------------------------------------------------------------------------------------- the norms


@holds_for(st.data(), widths, epsilons)
def test_norms_agree_with_torch(data, width, eps):
    x = data.draw(activations(width))
    r = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    assert_same(algebra.rms_norm(x, eps), F.rms_norm(x, (width,), eps=eps), x.abs() / r)

    terms = x.abs() + x.abs().mean(-1, keepdim=True)
    centered = x - x.mean(-1, keepdim=True)
    std = (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = F.layer_norm(x, (width,), eps=eps)
    assert_same(algebra.layer_norm_core(x, eps), expected, normalized_terms(terms, centered, std))


def test_norm_without_epsilon_is_scale_free():
    x = torch.tensor([[3.0, -4.0, 0.0]], dtype=torch.float64)
    assert_same(algebra.rms_norm(1e-8 * x, 0.0), algebra.rms_norm(x, 0.0), torch.ones_like(x))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gain_of_a_bf16_weight_keeps_every_bit(offset):
    weight = torch.tensor([2.0**-9, -1.0, 0.0, 3.5], dtype=torch.bfloat16)
    assert torch.equal(algebra.gain_of(weight, offset), weight.float() + offset)


# --------------------------------------------------------------------------------------------------- fold


@holds_for(st.data(), widths, widths)
def test_fold_gain(data, width, outputs):
    """W (g ⊙ n) = (W diag(g)) n, with any map of the norm's channels onto W's input axis."""
    channels = data.draw(channel_maps(width))
    inputs = width if channels is None else len(channels)
    n, gain = data.draw(activations(width)), data.draw(tensors(width))
    weight = data.draw(tensors((outputs, inputs)))
    expected = read(n * gain, channels, rest=0.5) @ weight.T  # -1: an input that the norm does not feed, here 0.5
    folded = algebra.fold_gain(weight, gain, channels=channels)
    terms = read((n * gain).abs(), channels, rest=0.5) @ weight.abs().T
    assert_same(read(n, channels, rest=0.5) @ folded.T, expected, terms)


@holds_for(st.data(), widths, widths)
def test_fold_and_shift_are_the_same_for_every_layout(data, width, outputs):
    """A transposed weight and a stack of experts fold as the plain (N, K) weights that they hold."""
    stack = data.draw(tensors((3, outputs, width)))
    gain, shift = data.draw(tensors(width)), data.draw(tensors(width))
    for expert, folded, moved in zip(
        stack, algebra.fold_gain(stack, gain), algebra.fold_shift(stack, shift), strict=True
    ):
        assert torch.equal(folded, algebra.fold_gain(expert, gain))
        assert torch.equal(folded.T, algebra.fold_gain(expert.T, gain, axis=0))
        terms = expert.abs() @ shift.abs()
        assert_same(moved, algebra.fold_shift(expert, shift), terms)
        assert_same(moved, algebra.fold_shift(expert.T, shift, axis=0), terms)


@holds_for(st.data(), widths, widths)
def test_unfold_inverts_fold(data, width, outputs):
    channels = data.draw(channel_maps(width))
    gain = data.draw(tensors(width, nonzero))
    weight = data.draw(tensors((outputs, width if channels is None else len(channels))))
    folded = algebra.fold_gain(weight, gain, channels=channels)
    assert_same(algebra.unfold_gain(folded, gain, channels=channels), weight, weight.abs())


def test_unfold_names_the_zero_gains_it_would_divide_by():
    gain = torch.tensor([1.0, 0.0, 2.0, -0.0])
    with pytest.raises(algebra.ZeroGainError, match="channel 1, 3 ") as caught:
        algebra.unfold_gain(torch.ones(2, 4), gain)
    assert caught.value.channels == [1, 3]
    with pytest.raises(algebra.ZeroGainError, match="channel 0, 1, 2, 3, 4, 5, 6, 7 and 12 more "):
        algebra.unfold_gain(torch.ones(2, 20), torch.zeros(20))
    algebra.unfold_gain(torch.ones(2, 3), gain, channels=torch.tensor([0, 2, -1]))  # reads neither of them


@holds_for(st.data(), widths, widths, st.booleans())
def test_fold_shift(data, width, outputs, has_bias):
    """W (g ⊙ n + b) + c = (W diag(g)) n + (c + W b), zero gains included."""
    channels = data.draw(channel_maps(width))
    n, gain, shift = data.draw(activations(width)), data.draw(tensors(width)), data.draw(tensors(width))
    weight = data.draw(tensors((outputs, width if channels is None else len(channels))))
    bias = data.draw(tensors(outputs)) if has_bias else None
    c = torch.zeros(outputs, dtype=torch.float64) if bias is None else bias
    actual = read(n, channels, rest=0.5) @ algebra.fold_gain(weight, gain, channels=channels).T
    actual = actual + algebra.fold_shift(weight, shift, bias, channels=channels)
    terms = read((n * gain).abs() + shift.abs(), channels, rest=0.5) @ weight.abs().T + c.abs()
    assert_same(actual, read(n * gain + shift, channels, rest=0.5) @ weight.T + c, terms)


@holds_for(st.data(), widths)
def test_kept_shift(data, width):
    """g ⊙ n + b = g ⊙ (n + b / g)."""
    n, gain, shift = data.draw(activations(width)), data.draw(tensors(width, nonzero)), data.draw(tensors(width))
    terms = (gain * n).abs() + shift.abs()
    assert_same(gain * (n + algebra.kept_shift(shift, gain)), gain * n + shift, terms)


def test_kept_shift_refuses_a_zero_gain():
    with pytest.raises(algebra.ZeroGainError, match="channel 1 "):
        algebra.kept_shift(torch.ones(2), torch.tensor([1.0, 0.0]))


# --------------------------------------------------------------------------------------------------- defer, cancel


@holds_for(st.data(), widths, widths, epsilons, st.booleans())
def test_deferred_linear(data, width, outputs, eps, has_bias):
    """W n(x) + c = (W x) / r(x) + c."""
    x, weight = data.draw(activations(width)), data.draw(tensors((outputs, width)))
    bias = data.draw(tensors(outputs)) if has_bias else None
    n = F.rms_norm(x, (width,), eps=eps)
    terms = n.abs() @ weight.abs().T + (0.0 if bias is None else bias.abs())
    assert_same(algebra.deferred_linear(x, weight, eps, bias), F.linear(n, weight, bias), terms)


@holds_for(st.data(), widths, widths, epsilons, epsilons)
def test_cancel_with_the_carried_epsilon(data, width, outputs, eps1, eps2):
    """n2(W n1(x)) = n2(W x) once eps2 carries r1(x)², for an RMSNorm and for a LayerNorm as the second norm."""
    x, weight = data.draw(activations(width)), data.draw(tensors((outputs, width)))
    eps = algebra.carried_epsilon(x, eps1, eps2)
    n1 = F.rms_norm(x, (width,), eps=eps1)
    u, terms = n1 @ weight.T, n1.abs() @ weight.abs().T

    expected = F.rms_norm(u, (outputs,), eps=eps2)
    r2 = (u.square().mean(-1, keepdim=True) + eps2).sqrt()
    assert_same(algebra.rms_norm(x @ weight.T, eps), expected, normalized_terms(terms, u, r2))

    expected = F.layer_norm(u, (outputs,), eps=eps2)
    centered = u - u.mean(-1, keepdim=True)
    terms = terms + terms.mean(-1, keepdim=True)
    std = (centered.square().mean(-1, keepdim=True) + eps2).sqrt()
    assert_same(algebra.layer_norm_core(x @ weight.T, eps), expected, normalized_terms(terms, centered, std))


@holds_for(st.data(), widths, epsilons, epsilons)
def test_cancel_with_a_norm_over_single_heads(data, width, eps1, eps2):
    heads, size = 2, 3
    x, weight = data.draw(activations(width)), data.draw(tensors((heads * size, width)))
    n1 = F.rms_norm(x, (width,), eps=eps1)
    u, terms = ((a @ w.T).unflatten(-1, (heads, size)) for a, w in ((n1, weight), (n1.abs(), weight.abs())))
    r2 = (u.square().mean(-1, keepdim=True) + eps2).sqrt()
    y = (x @ weight.T).unflatten(-1, (heads, size))
    eps = algebra.carried_epsilon(x, eps1, eps2).unsqueeze(-2)
    assert_same(algebra.rms_norm(y, eps), F.rms_norm(u, (size,), eps=eps2), normalized_terms(terms, u, r2))


@holds_for(st.data(), widths, widths, epsilons, epsilons)
def test_the_error_of_an_epsilon_that_is_left_as_it_is(data, width, outputs, eps1, eps2):
    """It is what the formula says for one token, and for none of several more than at the ends of their ranges."""
    x, weight = data.draw(activations(width)), data.draw(tensors((outputs, width)))
    y, square = x @ weight.T, algebra.carried_epsilon(x, eps1, 1.0)
    exact, rough = algebra.rms_norm(y, eps2 * square), algebra.rms_norm(y, eps2)
    error = algebra.dropped_epsilon_error(algebra.mean_square(y), square, eps2)
    # Both sides are differences of numbers near `exact`; of the factor 1 + error, and of its square root.
    assert_same((rough - exact).abs(), error * exact.abs(), (1 + error) * exact.abs() + rough.abs())
    least, ends = algebra.mean_square(y).min(), torch.stack([square.min(), square.max()])
    assert (error <= algebra.dropped_epsilon_error(least, ends, eps2).max() * (1 + RELATIVE) + RELATIVE).all()


# --------------------------------------------------------------------------------------------------- center


@holds_for(st.data(), widths, widths, epsilons)
def test_a_layer_norm_of_a_centered_stream_is_an_rms_norm(data, width, inner, eps):
    """The stream: an embedding row plus a linear with a bias, each centered along the stream's axis."""
    table, ids = data.draw(tensors((5, width))), torch.tensor([[0, 3, 4]])
    weight, bias = data.draw(tensors((width, inner))), data.draw(tensors(width))
    z = data.draw(tensors((1, 3, inner)))
    stream = table[ids] + z @ weight.T + bias
    centered = algebra.center(table, 1)[ids] + z @ algebra.center(weight, 0).T + algebra.center(bias, 0)

    terms = table.abs()[ids] + z.abs() @ weight.abs().T + bias.abs()
    terms = terms + terms.mean(-1, keepdim=True)
    exact = stream - stream.mean(-1, keepdim=True)
    std = (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    assert_same(centered, exact, terms)
    expected = F.layer_norm(stream, (width,), eps=eps)
    assert_same(algebra.rms_norm(centered, eps), expected, normalized_terms(terms, exact, std))


@holds_for(st.data(), widths, widths)
def test_a_linear_centered_along_its_input_reads_only_the_centered_input(data, width, outputs):
    x, weight = data.draw(activations(width)), data.draw(tensors((outputs, width)))
    terms = (x.abs() + x.abs().mean(-1, keepdim=True)) @ (weight.abs() + weight.abs().mean(-1, keepdim=True)).T
    assert_same(x @ algebra.center(weight, 1).T, (x - x.mean(-1, keepdim=True)) @ weight.T, terms)


# --------------------------------------------------------------------------------------------------- GLU


def random_tensor(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["relu", "relu2", "leaky_relu", "silu"])
@holds_for(st.data(), widths, st.floats(1e-3, 1e3))
def test_glu_scale(name, data, width, s):
    """W_down (act(s a) ⊙ (s b)) = t · W_down h, where h sees no scalar if the activation is homogeneous."""
    activation, degree = ACT2FN[name], algebra.HOMOGENEITY.get(name)
    gate, up = data.draw(tensors((2, width))), data.draw(tensors((2, width)))
    down, scale = data.draw(tensors((3, width))), torch.tensor([[s], [2 * s]], dtype=torch.float64)
    h, t = algebra.defer_glu_scale(gate, up, scale, activation, degree)
    exact = activation(scale * gate) * (scale * up)
    assert_same(t * (h @ down.T), exact @ down.T, exact.abs() @ down.abs().T)
    if degree is not None:
        assert torch.equal(h, activation(gate) * up)


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - {"xielu"}))  # xIELU needs a config; it contains an exponential
def test_every_activation_of_transformers_has_its_degree(name):
    """The table lists exactly the activations for which act(s z) = s^d act(z) holds for some d."""
    activation = ACT2FN[name].double()
    z, s = random_tensor(64, scale=5.0), 1.7  # wide enough to reach the bound of a clipped activation
    with torch.no_grad():
        before, after = activation(z), activation(s * z)
    ratio = (after / before)[before != 0]
    homogeneous = bool((ratio - ratio[0]).abs().max() < 1e-9)
    assert homogeneous == (name in algebra.HOMOGENEITY)
    if homogeneous:
        assert round(math.log(ratio[0].item(), s), 9) == algebra.HOMOGENEITY[name]


# --------------------------------------------------------------------------------------------------- LoRA


@holds_for(st.data(), widths, widths, st.integers(1, 3), st.sampled_from([-2, -1, 0, 1]))
def test_lora_follows_its_weight(data, width, other, rank, axis):
    """fold(W + B A) = fold(W) + B' A', whichever axis of W the gain scales and however its channels lie there."""
    channels = data.draw(channel_maps(width))
    along = width if channels is None else len(channels)
    outputs, inputs = (other, along) if axis in (-1, 1) else (along, other)
    weight, gain = data.draw(tensors((outputs, inputs))), data.draw(tensors(width))
    a, b = data.draw(tensors((rank, inputs))), data.draw(tensors((outputs, rank)))
    new_a, new_b = algebra.fold_lora(a, b, gain, axis, channels)
    terms = algebra.fold_gain(weight.abs() + b.abs() @ a.abs(), gain.abs(), axis, channels)
    folded = algebra.fold_gain(weight, gain, axis, channels)
    assert_same(folded + new_b @ new_a, algebra.fold_gain(weight + b @ a, gain, axis, channels), terms)


@holds_for(st.data(), widths, st.integers(1, 3), st.sampled_from([0, 1]))
def test_unfold_lora_inverts_fold_lora(data, width, rank, axis):
    channels = data.draw(channel_maps(width))
    along = width if channels is None else len(channels)
    a, b = data.draw(tensors((rank, along))), data.draw(tensors((along, rank)))
    gain = data.draw(tensors(width, nonzero))
    back = algebra.unfold_lora(*algebra.fold_lora(a, b, gain, axis, channels), gain, axis, channels)
    for actual, expected in zip(back, (a, b), strict=True):
        assert_same(actual, expected, expected.abs())


@holds_for(st.data(), widths, widths, st.integers(1, 3))
def test_lora_follows_its_weight_when_the_norm_bias_moves(data, width, outputs, rank):
    """(W + B A)(g ⊙ n + b) + c = (W' + B A') n + (c + W b) + B A b."""
    channels = data.draw(channel_maps(width))
    inputs = width if channels is None else len(channels)
    n, gain, shift = data.draw(activations(width)), data.draw(tensors(width)), data.draw(tensors(width))
    weight, bias = data.draw(tensors((outputs, inputs))), data.draw(tensors(outputs))
    a, b = data.draw(tensors((rank, inputs))), data.draw(tensors((outputs, rank)))
    expected = read(n * gain + shift, channels, rest=0.5) @ (weight + b @ a).T + bias

    folded = algebra.fold_gain(weight, gain, channels=channels) + b @ algebra.fold_lora(a, b, gain, 1, channels)[0]
    moved = algebra.fold_shift(weight, shift, bias, channels=channels) + algebra.lora_shift(a, b, shift, channels)
    terms = read((n * gain).abs() + shift.abs(), channels, rest=0.5) @ (weight.abs() + b.abs() @ a.abs()).T + bias.abs()
    assert_same(read(n, channels, rest=0.5) @ folded.T + moved, expected, terms)


def test_lora_of_stacked_experts_is_the_lora_of_each():
    a, b, gain = random_tensor(3, 2, 5, seed=1), random_tensor(3, 4, 2, seed=2), random_tensor(5, seed=3)
    new_a, _ = algebra.fold_lora(a, b, gain)
    for stacked, single in zip(new_a, a, strict=True):
        assert torch.equal(stacked, algebra.fold_lora(single, b[0], gain)[0])


def test_unfold_lora_names_a_zero_gain():
    with pytest.raises(algebra.ZeroGainError, match="channel 2 "):
        algebra.unfold_lora(torch.ones(1, 3), torch.ones(2, 1), torch.tensor([1.0, 2.0, 0.0]))


# --------------------------------------------------------------------------------------------------- contract


CALLS = {
    "mean_square": lambda x, w, g, c: algebra.mean_square(x),
    "rms": lambda x, w, g, c: algebra.rms(x, 1e-5),
    "rms_norm": lambda x, w, g, c: algebra.rms_norm(x, 1e-5),
    "layer_norm_core": lambda x, w, g, c: algebra.layer_norm_core(x, 1e-5),
    "gain_of": lambda x, w, g, c: algebra.gain_of(g, 1.0),
    "fold_gain": lambda x, w, g, c: algebra.fold_gain(w, g),
    "unfold_gain": lambda x, w, g, c: algebra.unfold_gain(w, g),
    "fold_shift": lambda x, w, g, c: algebra.fold_shift(w, g, c),
    "kept_shift": lambda x, w, g, c: algebra.kept_shift(g, g),
    "deferred_linear": lambda x, w, g, c: algebra.deferred_linear(x, w, 1e-5, c),
    "carried_epsilon": lambda x, w, g, c: algebra.carried_epsilon(x, 1e-5, 1e-6),
    "dropped_epsilon_error": lambda x, w, g, c: algebra.dropped_epsilon_error(x.square(), x.square(), 1e-6),
    "center": lambda x, w, g, c: algebra.center(w, 0),
    "defer_glu_scale": lambda x, w, g, c: algebra.defer_glu_scale(x, x, x[..., :1].abs(), torch.relu, 1)[0],
    "fold_lora": lambda x, w, g, c: algebra.fold_lora(w, w.T, g)[0],
    "unfold_lora": lambda x, w, g, c: algebra.unfold_lora(w, w.T, g)[0],
    "lora_shift": lambda x, w, g, c: algebra.lora_shift(w, w.T, g),
}
PER_TOKEN_OR_GAIN = {"mean_square", "rms", "gain_of", "carried_epsilon", "dropped_epsilon_error"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_are_kept_and_operands_left_alone(name, dtype):
    operands = [random_tensor(*s, seed=i).to(dtype) for i, s in enumerate([(2, 5), (5, 5), (5,), (5,)])]
    before = [t.clone() for t in operands]
    result = CALLS[name](*operands)
    assert result.dtype == (torch.promote_types(dtype, torch.float32) if name in PER_TOKEN_OR_GAIN else dtype)
    for operand, old in zip(operands, before, strict=True):
        assert torch.equal(operand, old)
        assert result.data_ptr() != operand.data_ptr()


def test_a_bf16_fold_rounds_once():
    weight, gain = random_tensor(64, 33).bfloat16(), random_tensor(33, seed=1).float()
    once = (weight.double() * gain.double()).bfloat16()
    assert torch.equal(algebra.fold_gain(weight, gain), once)
    assert not torch.equal(weight * gain.bfloat16(), once)  # the control: rounding the gain as well is seen


def test_two_gains_of_an_fp32_weight_round_once():
    generator = torch.Generator().manual_seed(0)
    weight, rows, columns = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (6,), (8,)))
    exact = weight.double() * rows.double()[:, None] * columns.double()
    assert torch.equal(algebra.fold_gains(weight, [(0, rows), (1, columns)]), exact.float())
    assert not torch.equal(weight * rows[:, None] * columns, exact.float())  # what a second rounding would give


@pytest.mark.parametrize(
    ("weight", "factors", "expected"),
    [
        (torch.bfloat16, [torch.float32], torch.float32),
        (torch.float16, [torch.float32] * 2, torch.float32),
        (torch.float32, [torch.float32], torch.float32),
        (torch.float32, [torch.float32] * 2, torch.float64),
        (torch.bfloat16, [torch.float64], torch.float64),
        (torch.float64, [torch.float32], torch.float64),
    ],
)
def test_products_are_taken_where_only_the_result_is_rounded(weight, factors, expected):
    assert algebra.product_dtype(weight, factors) == expected


def test_the_identity_map_is_that_of_the_whole_norm():
    assert algebra.least_channels(torch.arange(4), 4) is None
    assert algebra.least_channels(torch.arange(4), 8).tolist() == [0, 1, 2, 3], "a reader of the first half"
    assert algebra.least_channels(torch.tensor([1, 0]), 2).tolist() == [1, 0]


def test_one_plus_is_added_in_fp32():
    weight = torch.tensor([2.0**-7, -1.0], dtype=torch.bfloat16)
    assert algebra.gain_factor(weight, 1.0).dtype == torch.float32
    assert algebra.gain_factor(weight, 1.0).tolist() == [1 + 2.0**-7, 0.0]
    tiny = torch.tensor([2.0**-10], dtype=torch.bfloat16)
    assert algebra.gain_factor(tiny, 1.0).item() == 1 + 2.0**-10  # bf16 would have lost it
    assert algebra.gain_factor(torch.tensor([2.0**-40], dtype=torch.float64), 1.0).item() == 1 + 2.0**-40


def test_channels_pick_repeat_and_leave_alone():
    weight = torch.tensor([3.0, 5.0, 7.0])
    factor = algebra.gain_factor(weight, 0.0, torch.tensor([2, 2, -1, 0], dtype=torch.int32))
    assert factor.tolist() == [7.0, 7.0, 1.0, 3.0]


def test_fp16_squares_do_not_overflow():
    x = torch.full((1, 4), 6e4, dtype=torch.float16)
    assert torch.equal(algebra.rms_norm(x, 1e-6), torch.ones_like(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda: algebra.fold_gain(torch.ones(3, 4), torch.ones(1)),  # would broadcast silently
        lambda: algebra.fold_gain(torch.ones(3, 4), torch.ones(3)),
        lambda: algebra.fold_gain(torch.ones(3, 4), torch.ones(4), channels=torch.tensor([0, 1])),
        lambda: algebra.fold_gain(torch.ones(3, 2), torch.ones(4), channels=torch.tensor([0, 4])),
        lambda: algebra.fold_gain(torch.ones(3, 2), torch.ones(4), channels=torch.tensor([0, -2])),
        lambda: algebra.fold_shift(torch.ones(3, 4), torch.ones(4), torch.ones(1)),
        lambda: algebra.fold_shift(torch.ones(3, 4), torch.ones(3)),
        lambda: algebra.fold_lora(torch.ones(2, 4), torch.ones(3, 2), torch.ones(4), axis=2),
    ],
)
def test_operands_that_do_not_fit_are_refused(call):
    with pytest.raises(algebra.ShapeError):
        call()


def test_integer_codes_are_refused():
    with pytest.raises(Refusal, match="dequantise"):
        algebra.fold_gain(torch.ones(3, 4, dtype=torch.int8), torch.ones(4))


# --------------------------------------------------------------------------------------------------- planted faults


X, W, A = random_tensor(4, 5, scale=0.1), random_tensor(5, 5, seed=1), random_tensor(2, 5, seed=2)
B, G, C, SHIFT = random_tensor(5, 2, seed=3), 1 + random_tensor(5, seed=4) / 4, random_tensor(5, seed=5), X[0]
EPS = 1e-5
N = algebra.rms_norm(X, EPS)
R = algebra.rms(X, EPS)

FAULTS = {  # what goes wrong: (the wrong formula, the right result)
    "epsilon outside the root": (X / (X.square().mean(-1, keepdim=True).sqrt() + EPS), N),
    "epsilon inside the mean": (X / ((X.square().sum(-1, keepdim=True) + EPS) / 5).sqrt(), N),
    "epsilon dropped": (algebra.rms_norm(X, 0.0), N),
    "mean not subtracted": (N, algebra.layer_norm_core(X, EPS)),
    "gain on the wrong axis": (N @ algebra.fold_gain(W, G, axis=0).T, (G * N) @ W.T),
    "one-plus gain read as plain": (N @ algebra.fold_gain(W, G - 1).T, (G * N) @ W.T),
    "gain divided instead of multiplied": (N @ algebra.unfold_gain(W, G).T, (G * N) @ W.T),
    "channels ignored": (N @ algebra.fold_gain(W, G).T, (G.flip(0) * N) @ W.T),
    "shift seen through the folded weight": (
        N @ algebra.fold_gain(W, G).T + algebra.fold_shift(algebra.fold_gain(W, G), SHIFT, C),
        (G * N + SHIFT) @ W.T + C,
    ),
    "shift forgotten": (N @ algebra.fold_gain(W, G).T + C, (G * N + SHIFT) @ W.T + C),
    "shift kept without dividing it": (G * (N + SHIFT), G * N + SHIFT),
    "bias scaled with the product": ((X @ W.T + C) / R, F.linear(N, W, C)),
    "scalar forgotten": (X @ W.T, N @ W.T),
    "second epsilon not carried": (algebra.rms_norm(X @ W.T, EPS), algebra.rms_norm(N @ W.T, EPS)),
    "first epsilon not carried": (
        algebra.rms_norm(X @ W.T, EPS * algebra.mean_square(X)),
        algebra.rms_norm(N @ W.T, EPS),
    ),
    "cancelled over a bias": (
        algebra.rms_norm(X @ W.T + C, algebra.carried_epsilon(X, EPS, EPS)),
        algebra.rms_norm(N @ W.T + C, EPS),
    ),
    "centered along the input": (
        algebra.rms_norm(X @ algebra.center(W, 1).T, EPS),
        algebra.layer_norm_core(X @ W.T, EPS),
    ),
    "bias of the stream not centered": (
        algebra.rms_norm(X @ algebra.center(W, 0).T + C, EPS),
        algebra.layer_norm_core(X @ W.T + C, EPS),
    ),
    "SiLU taken for homogeneous": (F.silu(X) * X / R.square(), F.silu(X / R) * X / R),
    "ReLU² taken for degree 1": (F.relu(X).square() * X / R.square(), F.relu(X / R).square() * X / R),
    "adapter not translated": (
        N @ (algebra.fold_gain(W, G) + B @ A).T,
        (G * N) @ (W + B @ A).T,
    ),
    "adapter translated backwards": (
        N @ (algebra.fold_gain(W, G) + B @ algebra.unfold_lora(A, B, G)[0]).T,
        (G * N) @ (W + B @ A).T,
    ),
    "adapter scaled at its output": (
        N @ (algebra.fold_gain(W, G) + algebra.fold_lora(A, B, G, axis=0)[1] @ A).T,
        (G * N) @ (W + B @ A).T,
    ),
    "adapter's share of the moved bias forgotten": (
        N @ (algebra.fold_gain(W, G) + B @ algebra.fold_lora(A, B, G)[0]).T + algebra.fold_shift(W, SHIFT),
        (G * N + SHIFT) @ (W + B @ A).T,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_formula_is_caught(name):
    wrong, right = FAULTS[name]
    assert_same(right, right, right.abs())
    with pytest.raises(AssertionError, match="differs by"):
        assert_same(wrong, right, right.abs().max().expand_as(right))
