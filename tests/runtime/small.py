"""A small decoder of three blocks, written here: every kind of site that level one knows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.zoo.weights import randomise

WIDTH = 32


def llama(seed: int = 0, **config: object) -> LlamaForCausalLM:
    """A random Llama of two layers and 128 tokens, in fp32 and eval mode, with an untied head."""
    settings = {
        "vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    randomise(model, seed)
    return model.eval()


def prompt(length: int = 7, seed: int = 5) -> Tensor:
    """(2, length) token ids."""
    return torch.randint(3, 120, (2, length), generator=torch.Generator().manual_seed(seed))


def bits(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything that the model stores."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], value) for name, value in before.items())


class Norm(nn.Module):
    """Stock RMSNorm, with a fault to be planted: `doubled` multiplies its output, in eval mode like always."""

    def __init__(self, eps: float = 1e-5, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.offset + self.weight.float())).to(x.dtype)


class GatedBlock(nn.Module):
    """A gated MLP whose activation is given, in place of a name that would tell it."""

    def __init__(self, activation=F.silu, bias: bool = False):
        super().__init__()
        self.first = nn.Linear(WIDTH, 24, bias=bias)
        self.second = nn.Linear(WIDTH, 24, bias=bias)
        self.last = nn.Linear(24, WIDTH, bias=False)
        self.act = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.second(x)) * self.first(x))


class Sequence(PreTrainedModel):
    """Token ids to logits through `blocks`, each of which takes and returns the residual stream."""

    config_class = LlamaConfig

    def __init__(self, *blocks: nn.Module, seed: int = 0):
        super().__init__(LlamaConfig(vocab_size=128, hidden_size=WIDTH))
        self.embed = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        torch.manual_seed(seed)
        for block in blocks:
            for part in block.modules():
                if isinstance(part, (nn.Linear, nn.Embedding)):
                    part.reset_parameters()
        randomise(self, seed)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        for block in self.blocks:
            h = block(h)
        return {"logits": self.head(h)}


class Block(nn.Module):
    """x + inner(norm(x))."""

    def __init__(self, inner: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.norm = Norm() if norm is None else norm
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Sum(nn.Module):
    """a(x) + b(x) + c(x): linears that share their input."""

    def __init__(self, *biases: bool):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for bias in biases)

    def forward(self, x: Tensor) -> Tensor:
        return sum(linear(x) for linear in self.linears)
