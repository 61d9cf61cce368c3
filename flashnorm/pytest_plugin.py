"""The pytest plugin: the fixture `flashnorm_battery` runs the battery on what a test gives it, and fails the test.

    def test_my_kernel(flashnorm_battery):
        flashnorm_battery.operation(my_rms_linear, (x, weight, 1e-5), reference=plain_rms_linear)

    def test_my_engine(flashnorm_battery):
        flashnorm_battery(my_engine, only=["lag", "causality"])

It is found by pytest wherever the package is installed, and imports nothing heavy before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from flashnorm.verify.outcome import BatteryReport


class Battery:
    """What the fixture gives. A failed check fails the test with its sentence; the report is returned otherwise."""

    def __call__(self, target: Any, *, level: str = "quick", **options: Any) -> BatteryReport:
        """As `flashnorm.battery`, on a model, a checkpoint folder or an `Engine`."""
        import flashnorm

        return _judged(flashnorm.battery(target, level=level, **options))

    def operation(
        self, operation: Callable[..., Any], inputs: Sequence[Any], reference: Callable[..., Any] | None = None
    ) -> BatteryReport:
        """As `flashnorm.verify.operation.operation_battery`: one kernel, or what calls several."""
        from flashnorm.verify.operation import operation_battery

        return _judged(operation_battery(operation, inputs, reference))


def _judged(report: BatteryReport) -> BatteryReport:
    __tracebackhide__ = True
    if not report.passed:
        pytest.fail(report.verdict, pytrace=False)
    return report


@pytest.fixture
def flashnorm_battery() -> Battery:
    """Runs flashnorm's battery and fails the test where a check does."""
    return Battery()
