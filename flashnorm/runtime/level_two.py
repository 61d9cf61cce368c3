"""Level two: a decoder-only model generates through a decode program, which reads the model's own weights."""

from __future__ import annotations

import inspect
import threading
from typing import Any, NoReturn

from torch import nn

from flashnorm.errors import Refusal, Unsupported
from flashnorm.runtime.changes import Snapshot, anything_attached
from flashnorm.runtime.decode.program import Program
from flashnorm.runtime.decode.reading import read_spec
from flashnorm.runtime.decode.spec import Spec
from flashnorm.runtime.generate import generate, on_stock_path

_LONGEST = 4096  # tokens of a sequence, where the user names no bound and the model allows more
# What would leave the program with other weights than the model's.
_FORBIDDEN = ("_apply", "load_state_dict", "__deepcopy__", "__reduce_ex__")


def spec_of(model: nn.Module, max_length: int | None) -> Spec:
    """What the stock model computes. Raises `Unsupported` where it is no decoder that a program can run."""
    config = getattr(model, "config", None)
    if config is None or not getattr(model, "can_generate", lambda: False)():
        raise Unsupported(f"{type(model).__name__} generates no text; level two is for causal language models")
    sentence = anything_attached(model, recording=False)
    if sentence:
        raise Unsupported(f"{sentence}, and a decode program would not call it; remove it, or use level=1")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return read_spec(model, max_length=max_length or min(_LONGEST, positions or _LONGEST))


class LevelTwo:
    """A model with `generate` through a program, and the program itself as `model.slots`, for servers."""

    def __init__(self, model: nn.Module, spec: Spec, *, max_batch: int) -> None:
        """Raises `CapacityError` where the cache does not fit, with the model as it was."""
        self._model = model
        self.program = Program(spec, slots=max_batch)
        model.__dict__["generate"] = _Generate(model, self.program)
        model.__dict__["slots"] = self.program
        for name in _FORBIDDEN:
            model.__dict__[name] = _Refused(name)

    @property
    def described(self) -> str:
        """How many sequences of what length, and what their cache takes."""
        cache = self.program.cache
        size = sum(part.nbytes for part in (*cache.keys, *cache.values))
        return f"{self.program.slots} sequences of {self.program.max_length} tokens, {size / 1e9:.2f} GB of cache"

    def undo(self) -> None:
        """Leave the model as it was before."""
        self.program.close()
        for name in ("generate", "slots", *_FORBIDDEN):
            del self._model.__dict__[name]


class _Generate:
    """`model.generate`, with the parameters of the class's own. Calls on other threads wait for their turn."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        self._model, self._program = model, program
        self._snapshot = Snapshot(model)
        self._turn = threading.RLock()  # reentrant: a streamer may generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._by_name(args, kwargs)
        change = self._snapshot.change(self._model)
        if change:
            because = f"{change}, since it was accelerated; call model.unaccelerate() and accelerate it again"
            return on_stock_path(self._model, because, given)
        with self._turn:
            return generate(self._model, self._program, **given)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by its name. Raises Python's own `TypeError` where they do not fit the signature."""
        model_class: Any = type(self._model)
        bound = inspect.signature(model_class.generate).bind(self._model, *args, **kwargs)
        _, *names = list(bound.arguments)[: 1 + len(args)]
        return {**{name: bound.arguments[name] for name in names}, **kwargs}


class _Refused:
    """A method that a model cannot have while a program reads its weights."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        what = {"_apply": "moved or converted", "load_state_dict": "given other weights"}.get(self._name, "copied")
        raise Refusal(
            f"a model that is accelerated to level two cannot be {what}: its decode program and cache lie where they "
            "are; call model.unaccelerate() first"
        )
