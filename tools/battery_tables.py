"""Put the records of the battery into its page: on healthy models, and of an implicit join on a GPU.

Usage: `python -m tools.battery_tables`. How a page marks the place of a table: see `tools.tables`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from tools import tables
from tools.tables import RECORDS, ROOT, table

PAGE = ROOT / "docs" / "battery.md"
NAME, JOINS = "false-alarms", "implicit-join-h200"
_TITLES = ("subject", "runs", "false alarms", "largest figure, in its bound", "checks that ran", "longest run, s")


_FORMS = ("form", "race check accuses", "by", "longest run, s", "sanitizer", "unit tests that pass", "perplexity")
_TEXTS = ("form", "steps are", "lag check", "same tokens at first, of", "repeats, sound form's")
_SHOWN = 72  # characters of a text


def false_alarms(record: dict[str, Any]) -> str:
    """One line per healthy model of a record of `python -m benchmarks.false_alarms`."""
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in record["rows"]:
        runs[row["subject"]].append(row)
    whole = "" if record["complete"] else " The record is not complete."
    about = f"{record['alarms']} false alarms in {record['outcomes']} runs. {tables.where_from(record['provenance'])}."
    return "\n".join([*table(_TITLES, (_line(*subject) for subject in runs.items())), "", about + whole, ""])


def _line(subject: str, runs: list[dict[str, Any]]) -> tuple[object, ...]:
    ran = sorted({name for run in runs for name, passed in run["checks"].items() if passed is not None})
    return (
        subject,
        len(runs),
        sum(not run["passed"] for run in runs),
        f"{max(run['largest_figure_in_bounds'] for run in runs):.2f}",
        ", ".join(ran),
        f"{max(run['seconds'] for run in runs):.1f}",
    )


def implicit_join(record: dict[str, Any]) -> str:
    """The tables of a record of `python -m benchmarks.implicit_join`, what the sanitizer says, and what was written."""
    forms, model = record["forms"], record["model"]
    training = model["training"]
    about = (
        f"{tables.where_from(record['provenance'])}. The decoder: hidden size {model['hidden_size']}, "
        f"{model['num_hidden_layers']} layers, {model['parameters'] / 1e6:.1f} million parameters, trained on "
        f"{model['text']['bytes'] / 1e6:.1f} MB of sources for {training['seconds']:.0f} s ({training['steps']} steps); "
        f"perplexity of a held-out byte {forms[0]['perplexity']['reference']:.4g}, untrained "
        f"{model['untrained_perplexity']:.4g}."
    )
    whole = "" if record["complete"] else " The record is not complete."
    texts = [_text_line(form["name"], row) for form in forms for row in form["decoding"]]
    lines = [*table(_FORMS, map(_form_line, forms)), "", *table(_TEXTS, texts), "", about + whole, ""]
    return "\n".join([*lines, *_quoted("The sanitizer on", map(_finding, forms)), *_quoted("Text of", _written(forms))])


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
    return f"{form['name']}", form["sanitizer"]["finding"] or ""


def _written(forms: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The first text of each form that differs from the sound form's, beside that one."""
    for form in forms:
        for row in form["decoding"]:
            text = {} if row["refused"] else row["text"]
            if text and text["first"] != text["first_wanted"]:
                pair = (text["first"], text["first_wanted"])
                yield (
                    f"{form['name']}, {row['steps']}; the sound form's",
                    "\n".join(ascii(one[:_SHOWN]) for one in pair),
                )


def _quoted(what: str, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each text that is not empty, verbatim, under a line that says of what it is."""
    return [line for name, text in texts if text for line in (f"{what} {name}:", "", "```", text, "```", "")]


TABLES: Mapping[str, Callable[[dict[str, Any]], str]] = MappingProxyType({NAME: false_alarms, JOINS: implicit_join})


def _made(name: str) -> str:
    """The table of a record. A page may have a place for one that is still to be measured."""
    path = RECORDS / f"{name}.json"
    return TABLES[name](tables.read(path)) if path.exists() else "Not measured yet.\n"


def with_tables(page: str) -> str:
    """The page's text with its marked tables made anew."""
    return tables.with_tables(page, {name: partial(_made, name) for name in TABLES})


if __name__ == "__main__":
    tables.fill([PAGE], with_tables)
