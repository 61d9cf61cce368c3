"""The audit report as text: nothing of a name or a reason is lost, whatever characters are in it."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from flashnorm.cli.transform_rows import transforms_tables
from flashnorm.sites.audit import AuditReport
from flashnorm.sites.cancelling import CancellationAudit
from flashnorm.sites.render import summary_line, to_dict, verdict
from flashnorm.sites.transforms import FullAudit, Transforms, Verdict
from flashnorm.sites.types import Blocker, Consumer, GainConvention, Site

PLAIN = GainConvention(0.0, 1e-5, "inside_sqrt", False, False, "after_cast", 8, False)
ODD = GainConvention(1.0, 1e-6, "outside_sqrt", True, True, "before_cast", 8, True)
BLOCKER = Blocker("residual-add", "aten.add", "model [x.py:3]", "it is added [aten.add, model, x.py:3]", "--untie")


def _site(norm: str, convention: GainConvention | None = PLAIN, readers: int = 1, **changes: object) -> Site:
    consumers = tuple(Consumer(f"layer.reader{i}.weight", 1, "mm", "layer") for i in range(readers))
    values = {"weight": f"{norm}.weight", "bias": None, "width": 8, "blockers": (), **changes}
    return Site(norm=norm, convention=convention, consumers=consumers, **values)


FOLDS = _site("layer.norm", readers=8)
BLOCKED = _site("layer.other", ODD, blockers=(BLOCKER,))
WITHOUT = _site("layer.third", weight=None)
NOT_RUN = _site("layer.fourth", None, readers=0, blockers=(Blocker("unreached", "", "", "no run reached it"),))
REPORT = AuditReport("tiny", (FOLDS, BLOCKED, WITHOUT, NOT_RUN))


YES, NO = Verdict("yes"), Verdict("no", "an activation reads it")


def _full(report: AuditReport) -> FullAudit:
    """With made-up verdicts on all but folding."""
    transforms = {
        site.norm: Transforms(YES if site.foldable else Verdict("no", site.reason), YES, NO, Verdict("no", "no mean"))
        for site in report.sites
    }
    return FullAudit(report, transforms, CancellationAudit((), {}, {}))


def _shown(report: AuditReport, every: bool = True) -> list[str]:
    pages = []
    for table in transforms_tables(_full(report), every):
        page = io.StringIO()
        Console(file=page, width=250).print(table)
        pages.append(page.getvalue())
    return pages


def _cells(page: str) -> list[list[str]]:
    rows = [line for line in page.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_one_row_for_each_norm_and_one_for_each_reason() -> None:
    verdicts, reasons = map(_cells, _shown(REPORT))
    assert verdicts == [
        [
            "layer.norm", "RMSNorm w, eps 1e-05",
            "reader0, reader1, reader2, reader3, reader4 and 3 more", "yes", "yes", "no", "-",
        ],
        [
            "layer.other", "LayerNorm 1+w +bias gated, eps 1e-06 (outside_sqrt)", "reader0", "no", "yes", "no", "no",
        ],
        ["layer.third", "RMSNorm, eps 1e-05", "reader0", "no gain", "yes", "no", "-"],
        ["layer.fourth", "not run", "", "no", "yes", "no", "-"],
    ]  # fmt: skip
    assert reasons == [
        ["layer.norm", "cancel", "an activation reads it"],
        ["layer.other", "fold", "it is added [aten.add, model, x.py:3] (--untie removes this)"],
        ["layer.other", "cancel", "an activation reads it"],
        ["layer.other", "center", "no mean"],
        ["layer.third", "fold", "it has no gain"],
        ["layer.third", "cancel", "an activation reads it"],
        ["layer.fourth", "fold", "no run reached it"],
        ["layer.fourth", "cancel", "an activation reads it"],
    ]


def test_the_title_counts_norms_where_rows_are_fewer() -> None:
    alike = tuple(_site(f"layers.{n}.norm", readers=0, blockers=(BLOCKER,)) for n in range(4))
    verdicts, _ = _shown(AuditReport("tiny", alike), every=False)
    assert verdicts.splitlines()[0].strip() == "tiny: 4 norms"
    assert [row[0] for row in _cells(verdicts)] == ["layers.0-3.norm"]


def test_norms_of_different_verdicts_share_no_row() -> None:
    alike = tuple(_site(f"layers.{n}.norm", readers=0) for n in range(2))
    full = _full(AuditReport("tiny", alike))
    full.transforms["layers.1.norm"] = replace(full.transforms["layers.1.norm"], defer=Verdict("centered"))
    assert transforms_tables(full)[0].row_count == 2


@pytest.mark.parametrize("text", ["[red]", "[/INST]", "[link=x]", "a[0] [b]c[/b]", ":smile:", "[["])
def test_no_text_is_taken_for_markup(text: str) -> None:
    blocker = Blocker("residual-add", "op", "where", f"detail {text}")
    consumer = Consumer(f"r{text}", 1, "mm", "layer")
    site = Site(f"n{text}", "w", None, 8, PLAIN, (consumer,), (blocker,))
    shown = "".join(_shown(AuditReport(f"type {text}", (site,))))
    for part in (f"type {text}: 1 norms", f" n{text} ", f" r{text} ", f"detail {text} "):
        assert part in shown


def test_the_summary_counts() -> None:
    assert summary_line(REPORT) == (
        "1 of 4 norms can be folded; 2 cannot (1 residual-add, 1 unreached); 1 have no gain"
    )
    assert summary_line(AuditReport("tiny", (FOLDS,))) == "1 of 1 norms can be folded"


def test_plain_data_holds_all_of_it() -> None:
    table = json.loads(json.dumps(to_dict(REPORT)))
    assert (table["norms"], table["foldable"], table["summary"]) == (4, 1, summary_line(REPORT))
    assert [site["verdict"] for site in table["sites"]] == [verdict(site) for site in REPORT.sites]
    other = table["sites"][1]
    assert other["convention"]["kind"] == "LayerNorm"
    assert other["blockers"][0]["remedy"] == "--untie"
    assert other["readers"] == [
        {"weight": "layer.reader0.weight", "axis": 1, "op": "mm", "where": "layer", "partial": False}
    ]
    assert table["sites"][3]["convention"] is None
