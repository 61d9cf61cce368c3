"""One layer, read from its recorded run: its attention, what follows it, and its MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.attention_reading import read_attention
from flashnorm.runtime.decode.matching import activation_of, linear_part, linears, multiplier, same
from flashnorm.runtime.decode.norm_reading import norm_of, norms
from flashnorm.runtime.decode.positions import Positions
from flashnorm.runtime.decode.replica import Call, LayerRun
from flashnorm.runtime.decode.shared_gain import with_shared_gain
from flashnorm.runtime.decode.spec import Layer, Linear, Mlp, Norm


@dataclass(frozen=True)
class ReadLayer:
    """A layer, and the residual stream between its two halves as the model computed it."""

    layer: Layer
    middle: Tensor


@dataclass(frozen=True)
class _Middle:
    """Where the two halves meet: the stream there, the MLP's norm, and the value that the MLP's linears read."""

    stream: Tensor
    norm: Norm | None


def read_layer(run: LayerRun, positions: Positions) -> ReadLayer:
    """Raises `Unsupported`, naming the layer, where it is not an attention followed by an MLP as the spec has them."""
    attention = with_shared_gain(read_attention(run, positions))
    calls = linears(run.after)
    out, inner = calls[0], calls[1:]
    if len(inner) not in (2, 3):
        raise Unsupported(
            f"layer {run.index}: {len(inner)} nn.Linear follow the attention, where an MLP has two or three "
            "(a mixture of experts is not supported)"
        )
    middle = _middle(run, inner[0])
    post, branch = _post_norm(run, out)
    moved = middle.stream - run.input
    attention = replace(attention, post_norm=post, multiplier=multiplier(moved, branch))
    gate, up, activation = _activation(run, inner)
    post, branch = _post_norm(run, inner[-1])
    mlp = Mlp(
        norm=middle.norm,
        gate=gate,
        up=up,
        activation=activation,
        down=_whole(run, inner[-1]),
        post_norm=post,
        multiplier=multiplier(run.output - middle.stream, branch),
    )
    return ReadLayer(Layer(attention, mlp), middle.stream)


def _middle(run: LayerRun, first: Call) -> _Middle:
    """Walk back from the MLP's first linear to the residual stream."""
    assert first.input is not None
    for call in norms([*run.before, *run.after]):
        if call.input is None or not same(call.output, first.input):
            continue
        if same(call.input, run.input):
            raise Unsupported(f"layer {run.index}: its MLP runs beside its attention, not after it")
        return _Middle(call.input, norm_of(run, call))
    return _Middle(first.input, None)


def _post_norm(run: LayerRun, call: Call) -> tuple[Norm | None, Tensor]:
    """The norm that reads a linear's output before it joins the stream, and the value that joins."""
    for candidate in norms(run.after):
        if candidate.input is not None and same(candidate.input, call.output):
            return norm_of(run, candidate), candidate.output
    return None, call.output


def _activation(run: LayerRun, inner: list[Call]) -> tuple[Linear | None, Linear, str]:
    """(gate, up, activation): the one reading of the MLP's first linears that gives what its last one reads."""
    result = inner[-1].input
    assert result is not None
    width = result.shape[-1]
    if len(inner) == 2 and inner[0].output.shape[-1] == width:
        found = activation_of(inner[0].output, None, result)
        if found is not None:
            return None, _whole(run, inner[0]), found
    halves = _halves(run, inner[:-1], width)
    for (gate_value, gate), (up_value, up) in (halves, halves[::-1]) if len(halves) == 2 else ():
        found = activation_of(up_value, gate_value, result)
        if found is not None:
            return gate, up, found
    raise Unsupported(f"layer {run.index}: its MLP is neither act(gate) · up nor act(up) with a known activation")


def _halves(run: LayerRun, first: list[Call], width: int) -> list[tuple[Tensor, Linear]]:
    """The two products of a gated MLP: of two linears, or of one that holds both."""
    if len(first) == 2:
        return [(call.output, _whole(run, call)) for call in first]
    if first[0].output.shape[-1] != 2 * width:
        return []
    cuts = (slice(0, width), slice(width, 2 * width))
    return [(first[0].output[..., rows], linear_part(_own(run, first[0]), rows)) for rows in cuts]


def _whole(run: LayerRun, call: Call) -> Linear:
    own = _own(run, call)
    return linear_part(own, slice(0, own.out_features))


def _own(run: LayerRun, call: Call) -> nn.Linear:
    """The model's own module of a recorded call."""
    own = run.layer.get_submodule(call.name)
    assert isinstance(own, nn.Linear)
    return own
