"""Gemma 4's text model without the norms that cancel: before attention there is none, not even with a gain of one.

    h = x + n_post(attention(x)),    q = n_q(W_q x; eps r²),  k = n_k(W_k x; eps r²),  v = n_v(W_v x; eps r²)

with r² = mean(x²) + eps of the residual stream x, one number for each token, and the gain of the norm that stood here
inside of the weights. `python -m examples.gemma4_strict SOURCE FOLDED` compares the logits of a stock checkpoint with
those of this model on what `flashnorm fold SOURCE FOLDED --strict` wrote, which has no such gains; exit status 1 where
they differ by more than roundings of fp64. A fold rounds the weights that it changes to the dtype in which they are
stored, so only a source that is stored in fp64 gives that. One forward call without a cache, to be read; the equation
is `flashnorm.algebra.carried_epsilon`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.activations import ACT2FN

from flashnorm import algebra
from flashnorm.checkpoint.load import load
from flashnorm.checkpoint.manifest import read_manifest
from flashnorm.errors import CheckpointError, ConfigError, FlashnormError
from flashnorm.folders import require_folder
from flashnorm.sites.inputs import token_ids
from flashnorm.verify.oracle import exact_logits

# Of two fp64 runs that differ in the order of operations alone. A wrong scalar or epsilon lies far above.
TOLERANCE = 1e-10


class Norm(nn.Module):
    """RMSNorm over the last axis; without a gain where `width` is None."""

    def __init__(self, width: int | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width)) if width is not None else None

    def forward(self, x: Tensor, r_squared: Tensor | float = 1.0) -> Tensor:
        """`r_squared` (..., 1): what an earlier norm would have divided the square of `x` by."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        core = algebra.rms_norm(wide, self.eps * r_squared)
        return (core if self.weight is None else core * self.weight.to(wide.dtype)).to(x.dtype)


class Rope(nn.Module):
    """Rotary angles of one kind of layer; channels beyond a part of the head stay as they are."""

    def __init__(self, head_dim: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        if settings["rope_type"] not in ("default", "proportional"):
            raise ConfigError(f"this example has no RoPE of type {settings['rope_type']!r}")
        part = settings.get("partial_rotary_factor", 1.0) if settings["rope_type"] == "proportional" else 1.0
        pairs = int(part * head_dim // 2)
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu") / head_dim
        angles = F.pad(1.0 / settings["rope_theta"] ** exponents, (0, head_dim // 2 - pairs))
        self.angles = angles / settings.get("factor", 1.0)  # fp32 by definition, in a model of any dtype

    def forward(self, x: Tensor) -> Tensor:
        """`x`: (batch, tokens, heads, head_dim)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = torch.arange(x.shape[1], dtype=wide)[:, None, None] * self.angles.repeat(2).to(wide)
        angles = angles.to(x.device)
        first, second = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


def shares(config: Any, layer: int) -> bool:
    """Whether the layer takes keys and values from an earlier one: the last few do."""
    return bool(layer >= config.num_hidden_layers - config.num_kv_shared_layers)


class Attention(nn.Module):
    """Queries, keys and values of the residual stream itself; each is normalised, and that takes the scalar out."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        own, kind = config.per_layer_config[layer], config.layer_types[layer]
        self.head_dim, self.eps, self.kind = own.head_dim, config.rms_norm_eps, kind
        self.window = config.sliding_window if kind == "sliding_attention" else None
        self.shared = shares(config, layer)
        width, kv = config.hidden_size, own.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)
        self.q_norm = Norm(self.head_dim, self.eps)
        if not self.shared:
            self.k_proj = nn.Linear(width, kv, bias=False)
            one_matrix = config.attention_k_eq_v and self.window is None
            self.v_proj = None if one_matrix else nn.Linear(width, kv, bias=False)
            self.k_norm, self.v_norm = Norm(self.head_dim, self.eps), Norm(None, self.eps)
        self.rope = Rope(self.head_dim, config.rope_parameters[kind])

    def forward(self, x: Tensor, shared: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """`x`: the residual stream (batch, tokens, width). `shared`: by kind of layer, the latest keys and values."""
        r_squared = algebra.carried_epsilon(x, self.eps, 1.0).unsqueeze(-2)  # for every head alike
        q = self.rope(self.q_norm(self._heads(self.q_proj(x)), r_squared))
        if not self.shared:
            k = self._heads(self.k_proj(x))
            v = k if self.v_proj is None else self._heads(self.v_proj(x))
            shared[self.kind] = self.rope(self.k_norm(k, r_squared)), self.v_norm(v, r_squared)
        k, v = (t.transpose(1, 2) for t in shared[self.kind])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if self.window is not None:
            mask = mask.triu(1 - self.window)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, scale=1.0, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    """down(act(gate(x)) ⊙ up(x))."""

    def __init__(self, width: int, inner: int, act: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj, self.act = nn.Linear(inner, width, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """The weight of every expert for every token, zero for those that it does not go to."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top, width = config.top_k_experts, config.hidden_size
        self.norm, self.proj = Norm(None, config.rms_norm_eps), nn.Linear(width, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.empty(width))
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.proj(self.norm(x) * self.scale * x.shape[-1] ** -0.5)
        weights, chosen = scores.softmax(-1, torch.promote_types(x.dtype, torch.float32)).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True) * self.per_expert_scale[chosen]
        return torch.zeros_like(scores).scatter(-1, chosen, weights.to(scores.dtype))


class Experts(nn.Module):
    """Every expert on every token: for reading, not for speed."""

    def __init__(self, config: Any, act: Any) -> None:
        super().__init__()
        count, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj, self.act = nn.Parameter(torch.empty(count, width, inner)), act

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("btk,enk->bten", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("bten,ekn,bte->btk", self.act(gate) * up, self.down_proj, weights)


class Layer(nn.Module):
    """Norms that stay: those behind attention and MLP, and the MLP's own, whose gate is not homogeneous; its gain is
    in the weights. There is no `input_layernorm`."""

    layer_scalar: Tensor

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        width, eps, act = config.hidden_size, config.rms_norm_eps, ACT2FN[config.hidden_activation]
        wide = config.use_double_wide_mlp and shares(config, layer)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm, self.post_feedforward_layernorm = Norm(width, eps), Norm(width, eps)
        self.pre_feedforward_layernorm = Norm(None, eps)
        self.mlp = Mlp(width, config.intermediate_size * (2 if wide else 1), act)
        self.register_buffer("layer_scalar", torch.empty(1))
        self.with_experts, inputs = config.enable_moe_block, config.hidden_size_per_layer_input
        if self.with_experts:
            self.router, self.experts = Router(config), Experts(config, act)
            self.pre_feedforward_layernorm_2 = Norm(None, eps)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = Norm(width, eps), Norm(width, eps)
        if inputs:
            self.act = act
            self.per_layer_input_gate = nn.Linear(width, inputs, bias=False)
            self.per_layer_projection = nn.Linear(inputs, width, bias=False)
            self.post_per_layer_input_norm = Norm(width, eps)

    def forward(self, x: Tensor, own: Tensor | None, shared: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """`own`: this layer's embedding of the tokens, or None."""
        x = x + self.post_attention_layernorm(self.self_attn(x, shared))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.with_experts:
            routed = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x))
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(y)
        if own is not None:
            gated = self.act(self.per_layer_input_gate(x)) * own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class Model(nn.Module):
    """Embeddings, layers, the final norm, whose gain is in the head where that is no input embedding as well."""

    def __init__(self, config: Any, final_gain: bool) -> None:
        super().__init__()
        self.inputs, self.count = config.hidden_size_per_layer_input, config.num_hidden_layers
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(self.count))
        self.norm = Norm(width if final_gain else None, eps)
        if self.inputs:
            packed = self.count * self.inputs
            self.embed_tokens_per_layer = nn.Embedding(config.vocab_size_per_layer_input, packed)
            self.per_layer_model_projection = nn.Linear(width, packed, bias=False)
            self.per_layer_projection_norm = Norm(self.inputs, eps)

    def forward(self, ids: Tensor) -> Tensor:
        x = _scaled(self.embed_tokens(ids))
        own: list[Tensor | None] = [None] * self.count
        if self.inputs:
            split = (self.count, self.inputs)
            seen = (self.per_layer_model_projection(x) * x.shape[-1] ** -0.5).unflatten(-1, split)
            told = _scaled(self.embed_tokens_per_layer(ids), self.inputs).unflatten(-1, split)
            own = list(((self.per_layer_projection_norm(seen) + told) * 2**-0.5).unbind(-2))
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, inputs in zip(self.layers, own, strict=True):
            x = layer(x, inputs, shared)
        return self.norm(x)


def _scaled(x: Tensor, width: int | None = None) -> Tensor:
    """An embedding times the root of its width, rounded to the model's dtype first, as the stock model has it."""
    return x * torch.tensor((width or x.shape[-1]) ** 0.5, dtype=x.dtype)


class StrictGemma4(nn.Module):
    """The language model: token ids (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, config: Any, final_gain: bool) -> None:
        super().__init__()
        self.model, self.cap = Model(config, final_gain), config.final_logit_softcapping
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(ids))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def load_strict(folder: Path, dtype: torch.dtype) -> StrictGemma4:
    """The model of a folder that `flashnorm fold --strict` wrote, with every stored tensor in its place and none left.

    Raises `ConfigError` for what is no causal text model of Gemma 4, `CheckpointError` where the fold was another.
    """
    require_folder(folder)
    config: Any = AutoConfig.from_pretrained(folder)
    if config.model_type != "gemma4_text" or config.attention_bias or config.use_bidirectional_attention == "all":
        raise ConfigError(
            f"{folder} is of type {config.model_type}; give a causal gemma4_text without attention biases"
        )
    manifest = read_manifest(folder)
    folded = {site.norm for site in manifest.sites}
    left = [i for i in range(config.num_hidden_layers) if f"model.layers.{i}.input_layernorm" not in folded]
    if manifest.mode != "strict" or left:
        raise CheckpointError(
            f"{folder} is a {manifest.mode} fold without the input norms of {len(left)} layers; "
            "write it by `flashnorm fold SOURCE FOLDED --strict`"
        )
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    with torch.device("meta"):
        model = StrictGemma4(config, final_gain="model.norm" not in folded)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the tensors of {folder} are not those of this model: {error}") from error
    return model.to(dtype).eval()


@torch.no_grad()
def compare(source: Path, folded: Path) -> float:
    """The relative error of this model's fp64 logits on `folded` against the stock model's on `source`, printed too."""
    strict, stock = load_strict(folded, torch.float64), load(source, dtype=torch.float64)
    ids = token_ids(stock, 32, seed=1)
    before = exact_logits(stock, ids, torch.float64)
    error = float((strict(ids).flatten(0, -2) - before).norm() / before.norm())
    norms = [sum("norm" in type(m).__name__.lower() for m in model.modules()) for model in (stock, strict)]
    print(f"{norms[0]} norms in the stock model, {norms[1]} here; relative error of the fp64 logits: {error:.1e}")
    return error


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m examples.gemma4_strict SOURCE FOLDED", file=sys.stderr)
        return 2
    try:
        return 0 if compare(Path(arguments[0]), Path(arguments[1])) <= TOLERANCE else 1
    except FlashnormError as refusal:
        print(f"gemma4_strict: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
