"""The battery's report as JUnit XML, which continuous-integration servers show as tests."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from flashnorm.verify.outcome import BatteryReport, Outcome

# XML 1.0 has no way to write other control characters, not even escaped.
_WRITABLE = {9, 10, 13}


def junit_xml(report: BatteryReport) -> str:
    """One test case for each check: passed, failed with its sentence and figures, or skipped with the reason."""
    root = Element("testsuites")
    suite = SubElement(
        root,
        "testsuite",
        name=_clean(f"flashnorm verify {report.subject}"),
        tests=str(len(report.outcomes)),
        failures=str(len(report.failures)),
        errors="0",
        skipped=str(sum(bool(outcome.skipped) for outcome in report.outcomes)),
        time=f"{sum(outcome.seconds for outcome in report.outcomes):.3f}",
    )
    for outcome in report.outcomes:
        _add_case(suite, outcome)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _add_case(suite: Element, outcome: Outcome) -> None:
    case = SubElement(suite, "testcase", classname="flashnorm.verify", name=outcome.name, time=f"{outcome.seconds:.3f}")
    if outcome.skipped:
        SubElement(case, "skipped", message=_clean(outcome.skipped))
    elif not outcome.passed:
        failure = SubElement(case, "failure", message=_clean(outcome.meaning), type="CheckFailed")
        failure.text = _clean("\n".join(f"{f.name}: {f.value:.6g}, bound {f.bound:.6g}" for f in outcome.failures))
    if outcome.notes:
        SubElement(case, "system-out").text = _clean("\n".join(outcome.notes))


def _clean(text: str) -> str:
    return "".join(letter for letter in text if ord(letter) >= 32 or ord(letter) in _WRITABLE)
