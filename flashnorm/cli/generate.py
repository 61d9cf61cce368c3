"""`flashnorm generate MODEL --prompt TEXT`."""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnorm.cli.options import AsJson, Dtype, Quiet, TrustRemoteCode, counted, device_named, print_json, say
from flashnorm.errors import CheckpointError, FlashnormError, Refusal, Unsupported
from flashnorm.folders import require_folder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from flashnorm.runtime.generate_text import GeneratedText

_COLDEST = 1e-6  # logits divided by much less would overflow in fp32


def command(
    model: Annotated[Path, typer.Argument(help="The checkpoint folder, folded or not; it is only read.")],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from, or the user's turn of a chat.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest token; default: what the folder's generation_config.json says."),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that make up this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same text.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Apply the chat template or not; default: where there is one.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; default: the first GPU, else the CPU.")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Run in this dtype, not the stored one.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Generate text, streaming, and say how fast it came."""
    text = _prompt(prompt, prompt_file)
    options = _sampling(max_new_tokens, temperature, top_p, top_k, seed)
    require_folder(model)
    if not quiet:
        say("generate", f"opening {model}")
    import torch

    from flashnorm.runtime.generate_text import encode_prompt, stream_text

    place = device_named(device)
    loaded, tokenizer = _load(model, place, dtype, trust_remote_code)
    ids = encode_prompt(tokenizer, text, chat)
    _check_fit(loaded, ids, max_new_tokens)
    if tokenizer.pad_token_id is not None:
        options["pad_token_id"] = tokenizer.pad_token_id
    weights = _weight_bytes(loaded) if place.type == "cuda" else None
    path = _accelerated(loaded, ids.shape[1] + max_new_tokens, quiet)
    if place.type == "cuda":  # kernels are compiled and graphs captured at first use
        stream_text(loaded, tokenizer, ids.to(place), lambda piece: None, **{**options, "max_new_tokens": 2})
    if seed is not None:
        torch.manual_seed(seed)
    answer = stream_text(loaded, tokenizer, ids.to(place), _swallow if as_json else _print, **options)
    figures = _figures(answer, loaded, weights)
    if as_json:
        print_json({"text": answer.text, **figures, "path": path, "device": str(place), "dtype": str(loaded.dtype)[6:]})
        return
    typer.echo()
    if not quiet:
        say("generate", _sentence(figures))


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise Refusal("generate takes the prompt from --prompt TEXT or from --prompt-file FILE; give one of the two")
    if file is not None:
        try:
            prompt = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Refusal(f"{file} is not UTF-8 text ({error}); convert it, or give another file") from error
        except OSError as error:
            reason = error.strerror or error
            raise Refusal(f"{file} cannot be read: {reason}; give --prompt-file the path of a text file") from error
    if not prompt:
        raise Refusal("the prompt is empty; give at least one character")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # how Python holds bytes it could not decode
        raise Refusal("the prompt is not valid text in the encoding of this terminal; use --prompt-file with UTF-8")
    return prompt


def _sampling(
    max_new_tokens: int, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> dict[str, Any]:
    """The arguments of `generate`. What is not given is left to the folder's generation_config.json."""
    accepted = {
        "--max-new-tokens": (max_new_tokens, max_new_tokens >= 1, "at least 1"),
        "--temperature": (
            temperature,
            temperature in (None, 0) or _COLDEST <= temperature < inf,
            f"0, or {_COLDEST} or more",
        ),
        "--top-p": (top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        "--top-k": (top_k, top_k is None or top_k >= 1, "at least 1"),
        "--seed": (seed, seed is None or 0 <= seed < 2**64, "from 0 to 2**64 - 1"),
    }
    for name, (value, fine, wanted) in accepted.items():
        if not fine:
            raise Refusal(f"{name} is {value}; it must be {wanted}")
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in drawn.items() if value is not None}
    if temperature == 0:
        if len(given) > 1:
            raise Refusal("--temperature 0 takes the likeliest token, and leaves nothing for --top-p or --top-k to do")
        return {**options, "do_sample": False, **dict.fromkeys(drawn)}
    return {**options, **({"do_sample": True, **given} if given else {})}


def _load(
    folder: Path, device: torch.device, dtype: Dtype | None, trust_remote_code: bool
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from flashnorm.checkpoint.load import load

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} has no tokenizer that Transformers can load; copy it from the model"
        ) from error
    try:
        model: Any = load(
            folder, trust_remote_code=trust_remote_code, dtype=getattr(torch, dtype.value) if dtype else "auto"
        )
    except OSError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"the weights in {folder} cannot be loaded: {reason}") from error
    if not getattr(model, "can_generate", lambda: False)():
        raise Unsupported(f"{folder} holds a {type(model).__name__}, which generates no text; give a causal LM")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise CheckpointError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens and the model has embeddings for "
            f"{model.get_input_embeddings().num_embeddings}; they do not belong together"
        )
    return model.to(device), tokenizer


def _check_fit(model: Any, ids: torch.Tensor, max_new_tokens: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and ids.shape[1] + max_new_tokens > most:
        raise Refusal(
            f"the prompt has {counted(ids.shape[1], 'token')} and --max-new-tokens is {max_new_tokens}, but the model "
            f"is made for {most} in all; shorten the prompt, or ask for fewer"
        )


def _accelerated(model: Any, max_length: int, quiet: bool) -> str:
    """Accelerate on a GPU; says which path runs, and returns its name."""
    if model.device.type != "cuda":
        if not quiet:
            say(
                "generate", f"on {model.device.type} the stock path of Transformers runs; acceleration needs a CUDA GPU"
            )
        return "stock"
    import flashnorm

    try:
        flashnorm.accelerate(model, max_batch=1, max_length=max_length)
    except FlashnormError as error:  # the stock model is as it was, and can do it
        if not quiet:
            say("generate", f"the stock path of Transformers runs, since the model could not be accelerated: {error}")
        return "stock"
    report = model.acceleration
    if not quiet:
        say(
            "generate",
            f"accelerated: level {report.level}, {len(report.replaced)} of {len(report.sites)} norms replaced",
        )
    return f"level {report.level}"


def _weight_bytes(model: nn.Module) -> int | None:
    from flashnorm.bench.traffic import weight_bytes

    return weight_bytes(model)


def _figures(answer: GeneratedText, model: Any, weights: int | None) -> dict[str, Any]:
    """`weights`: bytes of weights that a step reads, or None where the limit is not known."""
    figures: dict[str, Any] = {
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "first_token_s": answer.first_token_s,
        "tokens_per_s": answer.tokens_per_s,
        "bytes_per_token": None,
        "bytes_per_s_limit": None,
        "percent_of_limit": None,
    }
    if weights is None or answer.tokens_per_s is None:
        return figures
    from flashnorm.bench.limits import measure_ceilings
    from flashnorm.bench.traffic import cache_bytes

    cache = cache_bytes(model, answer.mean_context)
    if cache is None:
        return figures
    read, limit = weights + cache, 1e6 * measure_ceilings(model.device).bytes_per_us
    percent = 100 * answer.tokens_per_s * read / limit
    return {**figures, "bytes_per_token": read, "bytes_per_s_limit": limit, "percent_of_limit": percent}


def _sentence(figures: dict[str, Any]) -> str:
    parts = [counted(figures["new_tokens"], "token"), f"first token after {figures['first_token_s']:.3f} s"]
    if figures["tokens_per_s"] is not None:
        parts.append(f"{figures['tokens_per_s']:.1f} tokens/s")
    if figures["percent_of_limit"] is not None:
        parts.append(
            f"{figures['percent_of_limit']:.0f}% of the bandwidth limit ({figures['bytes_per_token'] / 1e9:.2f} GB a "
            f"token at {figures['bytes_per_s_limit'] / 1e12:.2f} TB/s)"
        )
    return ", ".join(parts)


def _print(piece: str) -> None:
    print(piece, end="", flush=True, file=sys.stdout)


def _swallow(piece: str) -> None:
    pass
