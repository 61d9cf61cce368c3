"""What is measured: one row per model, batch and context, and who is timed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from flashnorm.errors import Refusal

OURS = "flashnorm"
LEVEL_ONE = "flashnorm level one"
RECIPE = "gpt-fast recipe"
TUNED_RECIPE = "gpt-fast recipe, tuned"
HF_COMPILED = "HF static cache + compile"
HF_EAGER = "HF eager"
PREFILL_COMPILED = "HF SDPA + compile"
PREFILL_EAGER = "HF SDPA eager"
PROJECT = frozenset({OURS, LEVEL_ONE})
COMPILED = frozenset({RECIPE, TUNED_RECIPE, HF_COMPILED, PREFILL_COMPILED})
_ALIGNED = 8
LEAD = 16  # untimed steps before the timed ones: a new cache makes Transformers' compiled step record itself anew


class Work(str, Enum):
    """Steps of one token per sequence, or a whole prompt at once."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `context`: for decode, the tokens in the cache at the first timed step; for prefill, those of the prompt. `tokens`:
    timed steps of a run.
    """

    name: str
    shape: str  # of `flashnorm.bench.decode.SHAPES`
    contenders: tuple[str, ...]
    work: Work = Work.DECODE
    batch: int = 1
    context: int = 256
    tokens: int = 512

    @property
    def prompt(self) -> int:
        """Tokens read before the steps begin."""
        return self.context if self.work is Work.PREFILL else self.context - LEAD

    @property
    def length(self) -> int:
        """For how many tokens everyone's cache has room: those of the last step and the next, which is chosen only.

        Rounded up, since the library's matmuls and masks are slower where a row is no multiple of 16 bytes.
        """
        needed = self.context if self.work is Work.PREFILL else self.context + self.tokens + 1
        return -(-needed // _ALIGNED) * _ALIGNED


_BASELINES = (OURS, RECIPE, HF_COMPILED)
_PREFILL = (OURS, PREFILL_COMPILED, PREFILL_EAGER)

# The cheapest first, so that a run which is cut short has measured the most.
ROWS = (
    Row("level-one-llama-3.2-1b", "llama-3.2-1b", (LEVEL_ONE, HF_EAGER)),
    Row("decode-llama-3.2-1b", "llama-3.2-1b", (*_BASELINES, HF_EAGER)),
    Row("decode-llama-3.2-1b-batch-8", "llama-3.2-1b", (OURS, RECIPE), batch=8),
    Row("decode-llama-3.2-1b-batch-32", "llama-3.2-1b", (OURS, RECIPE), batch=32),
    # The steps' mean context is 8,192.
    Row("decode-llama-3.2-1b-context-8192", "llama-3.2-1b", (OURS, RECIPE), context=8192 - 256),
    Row("prefill-llama-3.2-1b", "llama-3.2-1b", _PREFILL, Work.PREFILL, context=2048),
    Row("decode-smollm2-135m", "smollm2-135m", _BASELINES),
    Row("decode-qwen3-1.7b", "qwen3-1.7b", _BASELINES),
    Row("decode-llama-3.1-8b", "llama-3.1-8b", _BASELINES),
    Row("prefill-llama-3.1-8b", "llama-3.1-8b", _PREFILL, Work.PREFILL, context=2048),
)


def choose_rows(names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names in the table's order; all of them for no name. Raises `Refusal` for an unknown one."""
    known = [row.name for row in ROWS]
    for name in names:
        if name not in known:
            raise Refusal(f"there is no row {name!r}; the rows are {', '.join(known)}")
    return tuple(row for row in ROWS if not names or row.name in names)


def contenders_of(row: Row, *, compiled: bool, tuned: bool) -> tuple[str, ...]:
    """Who is timed: without `compiled` none that needs torch.compile; with `tuned` a second, tuned recipe as well."""
    names = [*row.contenders, *([TUNED_RECIPE] if tuned and RECIPE in row.contenders else [])]
    return tuple(name for name in names if compiled or name not in COMPILED)
