"""From a model to its spec: run a replica on a few tokens, read every layer as it runs, then the ends."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import Tensor, nn

from flashnorm.errors import Unsupported
from flashnorm.runtime.decode.guard import running_on
from flashnorm.runtime.decode.layer_reading import read_layer
from flashnorm.runtime.decode.locating import device_of
from flashnorm.runtime.decode.matching import likeness, linear_part, linears, multiplier, same
from flashnorm.runtime.decode.norm_reading import norms, read_norm
from flashnorm.runtime.decode.positions import Positions
from flashnorm.runtime.decode.proof import prove_ends, prove_far, prove_layer
from flashnorm.runtime.decode.replica import Call, LayerRun, Replica, Surroundings
from flashnorm.runtime.decode.spec import Head, Layer, Spec, linears_of

_TOKENS = 37  # a number that no dimension of a model is likely to equal
_FAR = 1e6  # a logit so large that any soft cap is reached, and that fp32 still resolves


def read_spec(model: nn.Module, *, max_length: int) -> Spec:
    """What a decoder-only Transformers model computes, proven against its own forward on probe tokens.

    `max_length`: for how many positions. Works from what the model's modules do, whatever the architecture is called;
    the model itself is only read, and must have its own modules: read it before `accelerate` replaces any. While it
    runs it takes an fp32 copy of the embeddings, the head and one layer, and an fp64 copy of the largest weight. Raises
    `Unsupported`, with what and where, for a model that the spec cannot describe or that computes anything else, and
    `CapacityError` where tables of so many positions do not fit into memory.
    """
    device = device_of(model)
    layers: list[Layer] = []
    positions: list[Positions] = []

    def read(run: LayerRun, seen: Surroundings) -> None:
        if not positions:
            positions.append(Positions(seen, max(max_length, _TOKENS)))
        found = read_layer(run, positions[0])
        prove_layer(found, run)
        layers.append(found.layer)

    with running_on(device), closing(Replica(model)) as replica:
        ids = _probe_tokens(replica.module, device)
        logits = replica.run(ids, read)
        spec = _with_ends(model, replica, ids, tuple(layers), max_length)
        prove_ends(spec, ids, replica.seen, logits)
        _refuse_mixed(spec)
        far = max(max_length, _TOKENS) - _TOKENS  # what depends on the position may show at the last ones only
        if far:
            replica.run(ids, lambda run, _seen: prove_far(layers[run.index], run, far), start=far)
    return spec


def _refuse_mixed(spec: Spec) -> None:
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(f"its weights are {spec.dtype}; convert the model to bfloat16, float16 or float32")
    for index, layer in enumerate(spec.layers):
        found = {linear.weight.dtype for linear in linears_of(layer)}
        if found != {spec.dtype}:
            raise Unsupported(f"layer {index}: weights of {found}, where the embedding is {spec.dtype}")
    if spec.head.linear.weight.dtype != spec.dtype:
        raise Unsupported(f"its head is {spec.head.linear.weight.dtype}, where the embedding is {spec.dtype}")


def _probe_tokens(module: nn.Module, device: torch.device) -> Tensor:
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    if not isinstance(embedding, nn.Embedding):
        raise Unsupported(f"its tokens are looked up in a {type(embedding).__name__}, not in one nn.Embedding")
    vocabulary = embedding.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (1, _TOKENS), generator=generator, device="cpu").to(device)


def _with_ends(model: nn.Module, replica: Replica, ids: Tensor, layers: tuple[Layer, ...], max_length: int) -> Spec:
    seen = replica.seen
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = embedding.weight.detach()[ids].float()
    first = seen.inputs[0]
    if likeness(rows, first) < 1 - 1e-5:
        raise Unsupported("its first layer reads more than the embedding of the token (such as learned positions)")
    head_call = _head_call(seen)
    norm_call = next((c for c in norms(seen.calls) if same(c.output, head_call.input)), None)  # type: ignore[arg-type]
    norm = None
    if norm_call is not None:
        norm = read_norm(norm_call, model.get_submodule(norm_call.name), "final norm", replica.probes)
    own_head = model.get_submodule(head_call.name)
    assert isinstance(own_head, nn.Linear)
    slope, cap = _after_head(replica, head_call.name, ids)
    head = Head(norm, linear_part(own_head, slice(0, own_head.out_features)), slope, cap)
    return Spec(embedding.weight, multiplier(first, rows), layers, head, max_length)


def _head_call(seen: Surroundings) -> Call:
    found = linears(seen.calls)
    if not found or found[-1].output.shape[:-1] != seen.outputs[-1].shape[:-1]:
        raise Unsupported("its logits do not come from one nn.Linear after the last layer")
    return found[-1]


def _after_head(replica: Replica, head: str, ids: Tensor) -> tuple[float, float | None]:
    """(multiplier, cap) of what the model does to its head's output, by giving the head an output of our own."""
    module = replica.outside[head]

    def answer(value: float) -> float:
        handle = module.register_forward_hook(lambda _m, _a, output: torch.full_like(output, value))
        try:
            return float(_layerless(replica, ids).flatten()[0])
        finally:
            handle.remove()

    far, near = answer(_FAR), answer(1.0)
    if far >= 0.5 * near * _FAR:
        return _stated(near), None
    cap = _stated(far)
    # cap · tanh(m / cap) = near
    return _stated(cap * torch.atanh(torch.tensor(near / cap, dtype=torch.float64)).item()), cap


def _stated(value: float) -> float:
    return multiplier(torch.tensor([value]), torch.ones(1))


def _layerless(replica: Replica, ids: Tensor) -> Tensor:
    """The replica's logits with its layers passed over: only what comes after the head is of interest."""
    with replica.layers_passed():
        return replica.module(input_ids=ids, use_cache=False).logits
