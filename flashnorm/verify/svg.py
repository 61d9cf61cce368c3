"""Small plots as inline SVG: lines, bars and a heat map. No script, no font and no file from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 640, 260, 48
_COLOURS = ("#1f6feb", "#d1242f", "#8c959f", "#1a7f37")


@dataclass(frozen=True)
class Line:
    """One curve: a value for each x, in their order; what is not finite leaves a gap."""

    label: str
    values: Sequence[float]


def line_plot(x: Sequence[float], lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Curves over a logarithmic y axis. Zeros lie on the floor: a tenth of the smallest positive value."""
    positive = [v for line in lines for v in line.values if math.isfinite(v) and v > 0]
    if not positive or not x:
        return ""
    floor = math.floor(math.log10(min(positive))) - (any(v == 0 for line in lines for v in line.values))
    top = max(math.ceil(math.log10(max(positive))), floor + 1)
    span = (min(x), max(max(x), min(x) + 1))
    parts = [_frame(x_label, y_label), *_ticks(span, (floor, top))]
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [
            f"{_across(a, span):.1f},{_up(max(math.log10(v), floor) if v > 0 else floor, (floor, top)):.1f}"
            for a, v in zip(x, line.values, strict=True)
            if math.isfinite(v)
        ]
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{" ".join(points)}"/>')
        parts.append(f'<text x="{MARGIN + 8}" y="{MARGIN + 4 + 14 * i}" fill="{colour}">{escape(line.label)}</text>')
    return _svg(WIDTH, HEIGHT, parts)


def heat_map(rows: Sequence[Sequence[float]], x_label: str, y_label: str) -> str:
    """Each row on its own scale: its smallest value darkest. A lag is a dark diagonal beside the white line."""
    if not rows:
        return ""
    size = 7
    side = size * max(len(rows), len(rows[0]))
    parts = []
    for i, row in enumerate(rows):
        known = [v for v in row if math.isfinite(v)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        for j, value in enumerate(row):
            shade = int(255 * (value - low) / (high - low)) if high > low and math.isfinite(value) else 255
            parts.append(
                f'<rect x="{MARGIN + size * j}" y="{size * i}" width="{size}" height="{size}" '
                f'fill="rgb({shade},{shade},{min(255, shade + 40)})"/>'
            )
    parts.append(
        f'<line x1="{MARGIN}" y1="0" x2="{MARGIN + side}" y2="{side}" stroke="#d1242f" stroke-width="0.6" '
        'stroke-dasharray="4 3"/>'
    )
    parts.append(f'<text x="{MARGIN}" y="{side + 18}">{escape(x_label)}</text>')
    parts.append(f'<text x="12" y="{side // 2}" transform="rotate(-90 12 {side // 2})">{escape(y_label)}</text>')
    return _svg(MARGIN + side + 8, side + 28, parts)


def bar_plot(labels: Sequence[str], values: Sequence[float], y_label: str) -> str:
    """Bars on a linear axis from zero; labels stand below where there is room."""
    finite = [v if math.isfinite(v) else 0.0 for v in values]
    top = max(finite, default=0.0) or 1.0
    step = (WIDTH - 2 * MARGIN) / max(len(values), 1)
    parts = [_frame("", y_label), f'<text x="4" y="{MARGIN}">{top:.3g}</text>']
    for i, (label, value) in enumerate(zip(labels, finite, strict=True)):
        height = (HEIGHT - 2 * MARGIN) * value / top
        x = MARGIN + step * i
        parts.append(
            f'<rect x="{x:.1f}" y="{HEIGHT - MARGIN - height:.1f}" width="{max(step - 1, 1):.1f}" '
            f'height="{height:.1f}" fill="{_COLOURS[0]}"><title>{escape(label)}: {value:.4g}</title></rect>'
        )
    return _svg(WIDTH, HEIGHT, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _frame(x_label: str, y_label: str) -> str:
    return (
        f'<rect x="{MARGIN}" y="{MARGIN - 10}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT - 2 * MARGIN + 10}" '
        f'fill="none" stroke="#d0d7de"/><text x="{WIDTH // 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
        f'<text x="{MARGIN}" y="{MARGIN - 16}">{escape(y_label)}</text>'
    )


def _ticks(span: tuple[float, float], decades: tuple[int, int]) -> list[str]:
    stride = max(1, (decades[1] - decades[0]) // 6)
    marks = [
        f'<text x="4" y="{_up(d, decades) + 4:.1f}">1e{d}</text>' for d in range(decades[0], decades[1] + 1, stride)
    ]
    ends = [
        f'<text x="{_across(value, span):.1f}" y="{HEIGHT - MARGIN + 14}" text-anchor="middle">{value:g}</text>'
        for value in span
    ]
    return [*marks, *ends]


def _across(value: float, span: tuple[float, float]) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * (value - span[0]) / (span[1] - span[0])


def _up(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - span[0]) / (span[1] - span[0])
