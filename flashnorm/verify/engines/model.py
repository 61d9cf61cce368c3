"""A Transformers causal language model as an engine: stock, with norms replaced, or changed by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from flashnorm.errors import ConfigError
from flashnorm.verify.engines.engine import Begin, Engine, Padded
from flashnorm.verify.engines.positions import derives_positions, pad_id
from flashnorm.verify.forward import TransformersModel
from flashnorm.verify.oracle import choose_oracle, exact_logits

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # by release and family
_LONGEST = 4096  # tokens of a sequence, where the model states no limit
_KEPT_BACK = 4  # positions that a model may keep back from those it states: RoBERTa's first token stands at 2


def model_engine(
    model: TransformersModel, name: str, load_stock: Callable[[], TransformersModel] | None = None
) -> Engine:
    """`model` in eval mode, on any device. `load_stock`: a private copy of it as Transformers runs it, for the oracle.

    Raises `ConfigError` where it is not a causal language model: then there is no next token, no cache and no lag.
    """
    config = getattr(model, "config", None)
    if config is None or config.is_encoder_decoder or not getattr(model, "can_generate", lambda: False)():
        raise ConfigError(
            f"{name} is no decoder-only language model that Transformers can generate with; the battery checks those, "
            "and `flashnorm verify SRC DST` compares any two checkpoints"
        )
    text = config.get_text_config()
    forward = inspect.signature(model.forward).parameters
    begin, why = _decoding(model)
    return Engine(
        name=name,
        vocabulary=text.vocab_size,
        dtype=main_dtype(model),
        fresh=lambda ids: _logits(model, ids),
        exact=_Oracle(load_stock, main_dtype(model)) if load_stock else None,
        padded=_padding(model) if "attention_mask" in forward else None,
        begin=begin,
        limit=_limit(text),
        window=getattr(text, "sliding_window", None),
        undecodable=why,
    )


def _limit(config: Any) -> int:
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return stated - _KEPT_BACK if isinstance(stated, int) and stated > _KEPT_BACK else _LONGEST


def _decoding(model: TransformersModel) -> tuple[Begin | None, str]:
    """How the model decodes, tried on two tokens; else why it does not, in its own words."""
    forward = inspect.signature(model.forward).parameters
    cache = next((known for known in CACHE_NAMES if known in forward), None)
    if cache is None:
        return None, "its forward takes no cache"
    try:
        trial = ModelDecoding(model, cache)
        for _ in range(2):
            trial.extend(torch.zeros(1, 1, dtype=torch.int64))
    except Exception as error:  # third-party code: some models need a cache of their own
        return None, (str(error).strip().splitlines() or [type(error).__name__])[0]
    return lambda rows: ModelDecoding(model, cache), ""


def main_dtype(model: TransformersModel) -> torch.dtype:
    """The dtype that logits are computed in: that of the output embeddings, else of the first weight."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return weight.dtype if weight is not None else next(model.parameters()).dtype


class ModelDecoding:
    """Sequences in Transformers' own dynamic cache."""

    def __init__(self, model: TransformersModel, cache_name: str) -> None:
        self._model, self._name = model, cache_name
        self._cache: Any = DynamicCache(config=model.config)

    def extend(self, ids: Tensor) -> Tensor:
        return _logits(self._model, ids, **{self._name: self._cache})

    def close(self) -> None:
        self._cache = None


class _Oracle:
    """Logits in the finest arithmetic that fits into memory; the copy that is upcast is loaded at the first use."""

    def __init__(self, load: Callable[[], TransformersModel], own: torch.dtype) -> None:
        self._load, self._own = load, own
        self._model: TransformersModel | None = None
        self._dtype = torch.float64

    def __call__(self, ids: Tensor) -> Tensor:
        if self._model is None:
            self._model = self._load()
            vocabulary = self._model.config.get_text_config().vocab_size
            self._dtype = choose_oracle(self._model, self._own, ids.numel() * vocabulary)
        logits = exact_logits(self._model, ids.cpu(), self._dtype)
        return logits.view(*ids.shape, -1)


@torch.inference_mode()
def _logits(model: TransformersModel, ids: Tensor, **more: Any) -> Tensor:
    inputs = {"input_ids": ids.to(model.device), **more}
    if not more and {"use_cache", "kwargs"} & inspect.signature(model.forward).parameters.keys():
        inputs["use_cache"] = False
    return model(**inputs).logits


def _padding(model: TransformersModel) -> Padded:
    """How the model is asked with padding; positions are traced when it is asked first, and then known."""
    own_positions = lru_cache(maxsize=1)(lambda: derives_positions(model, _logits))
    return lambda ids, mask: _padded(model, ids, mask, own_positions())


def _padded(model: TransformersModel, ids: Tensor, mask: Tensor, own_positions: bool) -> Tensor:
    """As `generate` runs a padded batch: positions count the tokens that are there.

    A model that derives its own positions counts the ids that are not its padding id, so these are what pads.
    """
    more: dict[str, Any] = {"attention_mask": mask.to(model.device)}
    pad = pad_id(model)
    if own_positions and pad is not None:
        ids = ids.masked_fill(mask == 0, pad)
    elif "position_ids" in inspect.signature(model.forward).parameters:
        more["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0).to(model.device)
    if "use_cache" in inspect.signature(model.forward).parameters:
        more["use_cache"] = False
    return _logits(model, ids, **more)
