"""The battery's report as one HTML page that needs nothing else: it can be mailed or kept beside a build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from flashnorm.verify.outcome import BatteryReport, Outcome, Series
from flashnorm.verify.svg import Line, bar_plot, heat_map, line_plot
from flashnorm.version import __version__

_STYLE = """
body { font-family: sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #1f2328; }
table { border-collapse: collapse; } td, th { border: 1px solid #d0d7de; padding: 0.3em 0.7em; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.passed { color: #1a7f37; } .failed { color: #d1242f; font-weight: bold; } .skipped { color: #656d76; }
figure { margin: 1em 0; } figcaption { color: #656d76; max-width: 44em; }
"""


def html_page(report: BatteryReport) -> str:
    """Verdict, figures with their bounds, and the plots of every check that has some."""
    body = [
        f"<h1>{escape(report.subject)}</h1>",
        f'<p class="{"passed" if report.passed else "failed"}">{escape(report.verdict)}</p>',
        _figures(report),
        *(f"<p>{escape(note)}</p>" for note in report.notes),
    ]
    for outcome in report.outcomes:
        body += _section(outcome)
    body.append(f"<p>flashnorm {__version__}, level {escape(report.level)}</p>")
    title = f"flashnorm verify: {escape(report.subject)}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _figures(report: BatteryReport) -> str:
    rows = []
    for outcome in report.outcomes:
        if outcome.skipped:
            rows.append(
                f'<tr><td>{outcome.name}</td><td colspan="3">{escape(outcome.skipped)}</td>'
                '<td class="skipped">skipped</td></tr>'
            )
        rows += [
            f'<tr><td>{outcome.name}</td><td>{escape(figure.name)}</td><td class="number">{figure.value:.4g}</td>'
            f'<td class="number">{figure.bound:.4g}</td>'
            f'<td class="{"passed" if figure.passed else "failed"}">{"passed" if figure.passed else "failed"}</td></tr>'
            for figure in outcome.figures
        ]
    head = "<tr><th>check</th><th>figure</th><th>value</th><th>bound</th><th></th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _section(outcome: Outcome) -> Iterator[str]:
    plots = [made for made in (plot(outcome.series) for plot in _PLOTS.get(outcome.name, ())) if made]
    if not plots and outcome.passed and not outcome.notes:
        return
    yield f"<h2>{escape(outcome.name)}</h2>"
    if not outcome.passed:
        yield f'<p class="failed">{escape(outcome.meaning)}</p>'
    yield from (f"<p>{escape(note)}</p>" for note in outcome.notes)
    yield from plots


def _figure(plot: str, caption: str) -> str:
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>" if plot else ""


def _distances(series: Series) -> str:
    if "own_distance" not in series:
        return ""
    lines = [
        Line("from its own fresh logits", series["own_distance"]),
        Line("from those of the step before", series["previous_distance"]),
        Line("what rounding explains", series["allowed"]),
    ]
    return _figure(
        line_plot(series["position"], lines, "position", "distance of cached logits"),
        "Distance of each step's cached logits. Where the blue line rises to the red one's usual height and the red "
        "one falls, the step was answered with what the step before left behind.",
    )


def _heat(series: Series) -> str:
    if "heat" not in series:
        return ""
    return _figure(
        heat_map(series["heat"], "fresh logits of step", "cached logits of step"),
        "Each row is one decode step, each column a step's fresh logits; dark is near. A right cache is dark along the "
        "dashed line, a lag along a diagonal beside it.",
    )


def _by_layer(series: Series) -> str:
    if "layer_error" not in series:
        return ""
    return _figure(
        bar_plot(series["layer"], series["layer_error"], "relative difference"),
        "Drift by layer: relative difference of each module's output, in the order in which they run.",
    )


def _divergence(series: Series) -> str:
    if "divergence" not in series:
        return ""
    return _figure(
        line_plot(series["position"], [Line("KL, nats", series["divergence"])], "position", "KL divergence"),
        "Kullback-Leibler divergence from the exact distribution by position.",
    )


def _products(series: Series) -> str:
    if "product" not in series:
        return ""
    lines = [
        Line("largest product before the scale", series["product"]),
        Line("largest input", series["largest"]),
        Line("epsilon over the smallest mean square", series["epsilon"]),
    ]
    return _figure(
        line_plot(list(range(len(series["norm"]))), lines, "norm, in the order in which they run", ""),
        "What each norm reads and what its readers would multiply it to, before the scale.",
    )


_PLOTS: dict[str, tuple[Callable[[Series], str], ...]] = {
    "lag": (_distances, _heat),
    "ranges": (_products,),
    "parity": (_divergence, _by_layer),
}
