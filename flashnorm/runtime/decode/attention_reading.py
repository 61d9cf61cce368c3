"""One layer's attention, read from its recorded run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.matching import by_head, likeness, linear_part, linears, parts, same
from flashnorm.runtime.decode.norm_reading import norm_of, norms
from flashnorm.runtime.decode.positions import Positions
from flashnorm.runtime.decode.replica import AttentionCall, Call, LayerRun
from flashnorm.runtime.decode.spec import Attention, Linear, Norm

# Below this cosine two values are not multiples of each other; rotary scaling of a part of the channels stays above.
_ALIKE = 0.9
_HARMLESS = {"dropout", "sliding_window", "softcap", "position_ids", "is_causal", "layer_idx", "output_attentions"}


@dataclass(frozen=True)
class _Source:
    """Where q, k or v comes from: rows of a linear, then perhaps a norm; its value (tokens, heads, head_dim)."""

    linear: Linear
    norm: Norm | None
    value: Tensor


def read_attention(run: LayerRun, positions: Positions) -> Attention:
    """The attention of one layer, up to its output projection; `layer_reading` adds what follows that.

    Raises `Unsupported`, naming the layer, where a part of it cannot be found or is not of the kind that the spec
    describes.
    """
    call, where = run.attention, f"layer {run.index}"
    _refuse_options(call, where)
    if not call.q.shape[-1] == call.k.shape[-1] == call.v.shape[-1]:
        raise Unsupported(f"{where}: queries and values have heads of different sizes")
    q, k, v = (_source(run, name, getattr(call, name)) for name in "qkv")
    if v.norm is not None:
        raise Unsupported(f"{where}: a norm on the values of attention")
    rope = positions.rope(run, q.value, k.value)
    if not linears(run.after):
        raise Unsupported(f"{where}: no nn.Linear reads the output of attention")
    out = linears(run.after)[0]
    if not same(out.input.flatten(), _heads_last(run).flatten()):  # type: ignore[union-attr]
        raise Unsupported(f"{where}: something stands between attention and its output projection")
    assert isinstance(out.module, nn.Linear)
    return Attention(
        norm=_input_norm(run),
        q=q.linear,
        k=k.linear,
        v=v.linear,
        heads=call.q.shape[1],
        kv_heads=call.k.shape[1],
        head_dim=call.q.shape[-1],
        q_norm=q.norm,
        k_norm=k.norm,
        rope=rope,
        scale=call.scale,
        softcap=call.options.get("softcap"),
        window=positions.window(run),
        out=linear_part(run.layer.get_submodule(out.name), slice(0, out.module.out_features)),  # type: ignore[arg-type]
        post_norm=None,
        multiplier=1.0,
    )


def _refuse_options(call: AttentionCall, where: str) -> None:
    for name, value in call.options.items():
        if value is None or name in _HARMLESS:
            continue
        if isinstance(value, Tensor):
            raise Unsupported(f"{where}: attention takes a tensor {name!r} (such as attention sinks)")


def _source(run: LayerRun, name: str, target: Tensor) -> _Source:
    """What q, k or v was before its rotation, found where that does nothing: at position 0."""
    heads, tokens, head_dim = target.shape[1:]
    wanted = by_head(target, heads, head_dim, tokens)
    assert wanted is not None
    found: list[tuple[float, _Source]] = []
    for call in linears(run.before):
        for value, rows in parts(call, heads * head_dim, head_dim):
            shaped = value[0].reshape(tokens, heads, head_dim)
            linear = linear_part(run.layer.get_submodule(call.name), rows)  # type: ignore[arg-type]
            found.append((likeness(shaped[0], wanted[0]), _Source(linear, None, shaped)))
            found += [
                (likeness(after[0], wanted[0]), _Source(linear, norm_of(run, normed), after))
                for normed, after in _normed(run, shaped)
            ]
    best = max(found, key=lambda pair: pair[0], default=None)
    if best is None or best[0] < _ALIKE:
        raise Unsupported(f"layer {run.index}: no rows of an nn.Linear give the {name} of attention")
    return best[1]


def _normed(run: LayerRun, value: Tensor) -> list[tuple[Call, Tensor]]:
    """Norms over one head's channels that read `value` (tokens, heads, head_dim), each with what it makes of it."""
    tokens, heads, head_dim = value.shape
    found = []
    for call in norms(run.before):
        if call.output.shape[-1] == heads * head_dim > head_dim and same(call.input.flatten(), value.flatten()):  # type: ignore[union-attr]
            raise Unsupported(
                f"layer {run.index}: a norm over the channels of all heads together, not over each head's"
            )
        read = by_head(call.input, heads, head_dim, tokens)  # type: ignore[arg-type]
        made = by_head(call.output, heads, head_dim, tokens)
        if call.output.shape[-1] == head_dim and read is not None and made is not None and same(read, value):
            found.append((call, made))
    return found


def _input_norm(run: LayerRun) -> Norm | None:
    """The norm between the layer's input and its projections."""
    readers = linears(run.before)
    for call in norms(run.before):
        if same(call.input, run.input) and any(same(r.input, call.output) for r in readers):  # type: ignore[arg-type]
            return norm_of(run, call)
    return None


def _heads_last(run: LayerRun) -> Tensor:
    """What attention gives, computed again with the recorded mask: (rows, tokens, heads · head_dim)."""
    call = run.attention
    group = call.q.shape[1] // call.k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (call.k, call.v))
    scores = call.q @ keys.transpose(-1, -2) * call.scale
    if call.options.get("softcap") is not None:
        scores = call.options["softcap"] * torch.tanh(scores / call.options["softcap"])
    if call.mask is not None:
        scores = scores + call.mask
    return (torch.softmax(scores, -1) @ values).transpose(1, 2).flatten(2)
