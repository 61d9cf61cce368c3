"""A small language model with DyT layers, as a checkpoint folder that brings its own code.

No architecture of Transformers has them: whoever trains one replaces the norms of a model by hand, and has to give the
folder the code that does so.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from transformers import LlamaForCausalLM

PAGE = (Path(__file__).parents[2] / "docs" / "dyt.md").read_text()
CODE = PAGE.partition("```python\n")[2].partition("```")[0]  # that of the example
_MODULE = "modeling_dyt"
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def code(folder: Path) -> ModuleType:
    """The folder's own module."""
    spec = importlib.util.spec_from_file_location(_MODULE, folder / f"{_MODULE}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_dyt(
    folder: Path,
    change: Callable[[torch.nn.Module], None] = lambda model: None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    source: str = CODE,
    **settings: object,
) -> Path:
    """Save a random model. `change`: what to do with it before; `settings`: of its config."""
    folder.mkdir(parents=True)
    (folder / f"{_MODULE}.py").write_text(source)
    module = code(folder)
    config = module.DytConfig(
        **{**SIZES, **settings},
        auto_map={"AutoConfig": f"{_MODULE}.DytConfig", "AutoModelForCausalLM": f"{_MODULE}.DytForCausalLM"},
    )
    model = module.DytForCausalLM(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("alpha"):
                parameter.copy_(0.4 + noise.abs())
            elif name.endswith("norm.weight"):
                parameter.copy_(noise + 0.5 * noise.sign())  # of both signs, and none of them near zero
            else:
                parameter.copy_(0.4 * noise)
        change(model)
    model.save_pretrained(folder)
    return folder


def load_dyt(folder: Path, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """The model of a folder, in fp64 unless told otherwise."""
    model = code(folder).DytForCausalLM.from_pretrained(folder, dtype=dtype)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(14).view(2, 7) * 5 % 32).logits


def as_stock(folder: Path) -> Path:
    """Take the code away from a folder and call the model a Llama, as who keeps the old config does."""
    (folder / f"{_MODULE}.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
