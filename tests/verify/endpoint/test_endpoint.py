"""A healthy server passes; each fault, planted in the model or in a proxy before the server, is told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashnorm.errors import Refusal
from flashnorm.verify.endpoint.checks import Text, check_lag, generate
from flashnorm.verify.endpoint.client import Answer, Client
from flashnorm.verify.endpoint.distance import distance, worst_distance
from flashnorm.verify.endpoint.suite import CHECKS, endpoint_battery
from tests.faults.attention import bidirectional
from tests.verify.endpoint import server
from tests.verify.tiny import save, tiny_model, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(server.sure(tiny_model("llama")), tmp_path_factory.mktemp("endpoint") / "model")


@pytest.fixture(scope="module")
def healthy(folder: Path) -> Iterator[str]:
    with server.serving(server.completions(server.sure(tiny_model("llama")))) as url:
        yield url


def test_a_healthy_server_passes_every_check(healthy: str, folder: Path) -> None:
    report = endpoint_battery(healthy, "tiny", reference=folder, level="quick")
    assert report.passed, report.verdict
    assert [outcome.name for outcome in report.outcomes] == list(CHECKS)
    assert not any(outcome.skipped for outcome in report.outcomes)


def test_prompts_are_text_without_a_reference() -> None:
    handle = server.completions(server.sure(tiny_model("llama")), tokenizer=tokenizer())
    with server.serving(handle) as url:
        report = endpoint_battery(url, "tiny", level="quick")
    assert "prompts are text" in report.notes[0]
    assert report.passed, report.verdict


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (server.late_by_one_step, "lag", "are those of 1 step before"),
        (server.late_once, "lag", "the log-probabilities at step 10 of 24 are those of 1 step before"),
        (server.other_among_others, "batching", "in one request, the log-probabilities at step"),
        (server.other_every_time, "determinism", "repeated, the log-probabilities at step"),
    ],
)
def test_a_proxy_with_a_fault_is_told_apart(healthy: str, folder: Path, fault, check: str, words: str) -> None:
    with server.serving(server.proxy(healthy, fault)) as url:
        report = endpoint_battery(url, "tiny", reference=folder, level="quick", only=[check])
    assert [outcome.name for outcome in report.failures] == [check]
    assert words in report.verdict


def test_attention_that_sees_the_future_is_found(folder: Path) -> None:
    with server.serving(server.completions(bidirectional(server.sure(tiny_model("llama"))))) as url:
        report = endpoint_battery(url, "tiny", reference=folder, level="quick", only=["causality"])
    assert "the model sees the future" in report.verdict


def test_a_server_without_echo_skips_causality(folder: Path) -> None:
    with server.serving(server.completions(tiny_model("llama"), echoes=False)) as url:
        report = endpoint_battery(url, "tiny", reference=folder, level="quick", only=["causality"])
    assert "does not echo prompts" in report["causality"].skipped
    assert "echo is not supported" in report["causality"].skipped
    assert not report.passed


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"choices": [{"text": "words"}]}, "gives no log-probabilities"),
        ({"choices": []}, "something else than as many choices"),
        ([], "something else than a JSON object"),
    ],
)
def test_what_is_no_completions_server_is_refused(answer, sentence: str) -> None:
    with server.serving(lambda body: answer) as url, pytest.raises(Refusal, match=sentence):
        endpoint_battery(url, "tiny")


def test_other_refusals(healthy: str) -> None:
    with pytest.raises(Refusal, match="the model huge does not exist"):
        endpoint_battery(healthy, "huge")
    with pytest.raises(Refusal, match="cannot be asked"):
        endpoint_battery("http://127.0.0.1:9/v1", "tiny")
    with pytest.raises(Refusal, match="cannot be asked: unknown url type"):
        endpoint_battery("somewhere", "tiny")
    with pytest.raises(Refusal, match="no check 'ranges' of an endpoint"):
        endpoint_battery(healthy, "tiny", only=["ranges"])
    with server.serving(server.completions(tiny_model("llama"), tokenizer=tokenizer())) as url:
        client = Client(url, "tiny")
        with pytest.raises(Refusal, match="does not name tokens by their ids"):
            generate(client, [1, 2, 3], 4)


def test_distances_are_never_too_large() -> None:
    one = {"a": -0.1, "b": -3.0}
    assert distance(one, one) == 0
    assert distance({"a": 0.0}, {"b": 0.0}) == 0  # each may hold the other just below its list
    assert distance({"a": -1.0, "c": -9.0}, {"b": -1.0, "c": -9.0}) == pytest.approx((2 * 64 / 3) ** 0.5)
    assert distance({"a": float("nan")}, one) != distance({"a": float("nan")}, one)
    assert distance({}, {}) == 0
    assert distance({}, one) == float("inf")


def test_answers_count_until_they_part() -> None:
    first = Answer(("a", "b", "c"), ({"a": -0.1}, {"b": -0.1, "x": -3.0}, {"c": -0.1}))
    other = Answer(("a", "x", "y"), ({"a": -0.1}, {"b": -3.0, "x": -0.1}, {"y": -9.0}))
    value, step = worst_distance(first, other)
    assert step == 1
    assert value == pytest.approx(2.9)


@pytest.mark.parametrize("late", [0, 1])
def test_noise_is_told_from_a_lag_even_of_every_step(late: int) -> None:
    fresh = tuple({"a": -0.1 - n % 5, "b": -3.0 - n % 7} for n in range(20))
    noisy = tuple({token: value + 0.01 * (-1) ** n for token, value in step.items()} for n, step in enumerate(fresh))
    text = Text((fresh[0],) * late + noisy[: 20 - late], fresh)
    assert text.allowed == pytest.approx(5 * max(0.01, 2**-8 * 6), rel=0.5)
    assert check_lag(text).passed is (late == 0)


def test_a_cache_of_something_else_is_found() -> None:
    fresh = tuple({"a": -0.1 - n % 5, "b": -3.0 - n % 7} for n in range(20))
    other = tuple({"a": -4.0 + n % 3, "b": -0.5 - n % 2} for n in range(20))
    outcome = check_lag(Text(other, fresh))
    assert [figure.name for figure in outcome.failures] == ["typical_distance"]
