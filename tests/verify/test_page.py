"""What is written for people and for machines: one page that needs nothing else, JUnit XML, a table."""

from __future__ import annotations

import io
import math
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from flashnorm.verify.junit import junit_xml
from flashnorm.verify.outcome import BatteryReport, Outcome
from flashnorm.verify.outcome_table import battery_table
from flashnorm.verify.page import html_page
from flashnorm.verify.report import Check
from flashnorm.verify.svg import Line, bar_plot, heat_map, line_plot

SERIES = {
    "position": [7, 8, 9],
    "own_distance": [1e-6, 3.0, 1e-6],
    "previous_distance": [math.inf, 1e-6, 3.0],
    "allowed": [1e-5] * 3,
    "heat": [[0.0, 1.0], [0.0, 1.0]],
}
REPORT = BatteryReport(
    "a <model> & more",
    "quick",
    (
        Outcome("causality", (Check("future_seen (prefill)", 0.0, 1.0, ""),), notes=("not tried with padding",)),
        Outcome("lag", (Check("stale_steps", 1, 0, "position 8 is stale"),), cause="a <buffer>\x00", series=SERIES),
        Outcome("races", skipped="no GPU is here"),
    ),
    ("no oracle",),
)


def test_the_page_shows_everything_and_loads_nothing() -> None:
    page = html_page(REPORT)
    assert "a &lt;model&gt; &amp; more" in page
    assert "position 8 is stale; likely cause: a &lt;buffer&gt;" in page
    assert "no GPU is here" in page
    assert page.count("<svg") == 2
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')> ]+)|(https?://[^"' <]+)""", page)
    assert {link or other for link, other in links} == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "<script" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_junit_counts_failures_and_skips_and_is_valid_xml() -> None:
    suite = ElementTree.fromstring(junit_xml(REPORT).encode())[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    failure = suite.find("testcase[@name='lag']/failure")
    assert failure.get("message") == "position 8 is stale; likely cause: a <buffer>"
    assert failure.text == "stale_steps: 1, bound 0"
    assert suite.find("testcase[@name='races']/skipped").get("message") == "no GPU is here"


def test_the_table_names_figures_skips_and_notes() -> None:
    page = io.StringIO()
    Console(file=page, width=160).print(battery_table(REPORT))
    text = page.getvalue()
    for part in (
        "a <model> & more (quick)",
        "FAILED",
        "not run: no GPU is here",
        "note: no oracle",
        "note: causality: ",
    ):
        assert part in text


def test_curves_keep_their_order_and_gaps() -> None:
    plot = line_plot([0, 1, 2], [Line("a", [1.0, math.inf, 100.0]), Line("b", [0.0, 10.0, 1.0])], "x", "y")
    first, second = (
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]*)"', plot)
    )
    assert len(first) == 2
    assert first[1][1] < first[0][1]  # larger is higher
    assert second[0][1] > second[2][1] > second[1][1]  # zero lies on the floor
    assert line_plot([0], [Line("a", [0.0])], "x", "y") == ""


def test_the_darkest_cell_of_a_row_is_its_smallest() -> None:
    shades = [
        int(value) for value in re.findall(r"rgb\((\d+),", heat_map([[3.0, 1.0, math.inf], [5.0, 5.0, 5.0]], "", ""))
    ]
    assert shades == [255, 0, 255, 255, 255, 255]
    assert heat_map([], "", "") == ""


def test_bars_rise_with_their_values() -> None:
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" fill="#1f6feb"', bar_plot(["a", "b"], [1.0, 2.0], "y"))]
    assert heights[1] == pytest.approx(2 * heights[0], rel=1e-2)
