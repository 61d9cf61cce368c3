"""The record of an implicit join on a GPU (`benchmarks.implicit_join`) as tables, and in its own words.

`tools.battery_tables` puts it into its page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tools.tables import table, where_from

_FORMS = ("form", "race check accuses", "by", "longest run, s", "sanitizer", "unit tests that pass", "perplexity")
_TEXTS = ("form", "steps are", "lag check", "same tokens at first, of", "repeats, sound form's")
_SHOWN = 72  # characters of a text


def implicit_join(record: dict[str, Any]) -> str:
    """The tables of a record of `python -m benchmarks.implicit_join`, what the sanitizer says, and what was written."""
    forms = record["forms"]
    whole = "" if record["complete"] else " The record is not complete."
    about = f"{where_from(record['provenance'])}. {_decoder(record['model'], forms[0]['perplexity']['reference'])}"
    texts = [_text_line(form["name"], row) for form in forms for row in form["decoding"]]
    lines = [*table(_FORMS, map(_form_line, forms)), "", *table(_TEXTS, texts), "", about + whole, ""]
    return "\n".join([*lines, *_quoted("The sanitizer on", map(_finding, forms)), *_quoted("Text of", _written(forms))])


def _decoder(model: Mapping[str, Any], perplexity: float) -> str:
    text, training = model["text"], model["training"]
    return (
        f"The decoder: hidden size {model['hidden_size']}, {model['num_hidden_layers']} layers, "
        f"{model['parameters'] / 1e6:.1f} million parameters, trained on {text['bytes'] / 1e6:.1f} MB of sources for "
        f"{training['seconds']:.0f} s ({training['steps']} steps); perplexity of a held-out byte {perplexity:.4g}, "
        f"untrained {model['untrained_perplexity']:.4g}."
    )


def _form_line(form: dict[str, Any]) -> tuple[object, ...]:
    runs, change = form["races"]["runs"], form["perplexity"]["relative_difference"]
    by = [f"{name} ({sum(name in run['by'] for run in runs)})" for name in ("clocks", "delays", "graph")]
    sanitizer = form["sanitizer"]
    return (
        form["name"],
        f"{sum(run['caught'] for run in runs)} of {len(runs)}",
        ", ".join(by),
        f"{max(run['seconds'] for run in runs):.2f}",
        "could not run" if sanitizer["refused"] else ("accuses" if sanitizer["finding"] else "says nothing"),
        f"{sum(test['passed'] for test in form['unit_tests'])} of {len(form['unit_tests'])}",
        change if isinstance(change, str) else f"{change:+.2%}",
    )


def _text_line(name: str, row: dict[str, Any]) -> tuple[object, ...]:
    if row["refused"]:
        return name, row["steps"], f"none: {row['refused']}", "", ""
    lag, text = row["lag"], row["text"]
    verdict = f"passes, {lag['steps']} steps" if lag["passed"] else lag["meaning"].replace("|", "\\|")
    same = f"{', '.join(map(str, text['same']))}, of {text['tokens']}"
    return name, row["steps"], verdict, same, f"{text['repeats']:.0%}, {text['repeats_wanted']:.0%}"


def _finding(form: dict[str, Any]) -> tuple[str, str]:
    """The first race that it reports, without the stack traces, which are indented."""
    lines = (form["sanitizer"]["finding"] or "").split("Tensor was allocated")[0].splitlines()
    kept = [line for line in lines if line.strip() and not line.startswith((" ", "With stack trace", "Trace for"))]
    return form["name"], "\n".join(kept)


def _written(forms: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The beginning of each first text that differs from the sound form's, and of that one."""
    for form in forms:
        for row in form["decoding"]:
            text = {"first": "", "first_wanted": ""} if row["refused"] else row["text"]
            pair = [ascii(text[name][:_SHOWN]) for name in ("first", "first_wanted")]
            if pair[0] != pair[1]:
                yield f"{form['name']}, {row['steps']}, and of the sound form", "\n".join(pair)


def _quoted(what: str, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each text that is not empty, verbatim, under a line that says of what it is."""
    return [line for name, text in texts if text for line in (f"{what} {name}:", "", "```", text, "```", "")]
