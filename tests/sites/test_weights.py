"""The ledger of weights: whose memory a tensor is, and along which axis it walks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.errors import TracingError
from flashnorm.sites.shadow import PLAIN
from flashnorm.sites.weights import Ledger, Read, place

ROWS, COLUMNS = 6, 4


def model(**parameters):
    made = nn.Module()
    for name, tensor in parameters.items():
        made.register_parameter(name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
    return made


def ledger():
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    return Ledger(model(w=weight)), weight.detach()


READ = Read("mm", "here", None, True)


@pytest.mark.parametrize(
    ("view", "axes"),
    [
        (lambda w: w, ((0, 0, 1), (1, 0, 1))),
        (lambda w: w.T, ((1, 0, 1), (0, 0, 1))),
        (lambda w: w[2:5], ((0, 2, 1), (1, 0, 1))),
        (lambda w: w[:, 1:3], ((0, 0, 1), (1, 1, 1))),
        (lambda w: w[1::2, 3:], ((0, 1, 2), None)),  # of size one: it walks nowhere
        (lambda w: w.view(2, 3, COLUMNS), ((0, 0, 3), (0, 0, 1), (1, 0, 1))),
        (lambda w: w[0].expand(5, COLUMNS), (None, (1, 0, 1))),
    ],
)
def test_a_view_is_located_along_the_parameters_axes(view, axes):
    book, weight = ledger()
    assert book.locate(view(weight)).axes == axes


def test_a_copy_is_followed_and_what_is_no_parameter_is_not():
    book, weight = ledger()
    copied = weight.double()
    assert book.locate(copied) is None
    book.remember_copy(copied, book.locate(weight))
    assert book.locate(copied.T).axes == ((1, 0, 1), (0, 0, 1))


def test_reads_of_parts_add_up_and_another_norms_is_a_conflict():
    book, weight = ledger()
    codes = torch.arange(1, COLUMNS + 1, dtype=torch.int32) * 2
    assert book.read(book.locate(weight[:3]), 1, codes, READ)
    assert book.read(book.locate(weight[3:, 1:]), 1, codes[1:], READ)
    assert book.usage["w"].codes[1].tolist() == codes.tolist()
    assert book.usage["w"].conflict is None
    assert book.read(book.locate(weight), 1, torch.full((COLUMNS,), PLAIN, dtype=torch.int32), READ)
    assert "read by different norms, or also by data without a norm" in book.usage["w"].conflict


def test_a_read_along_no_single_axis_is_another_use():
    book, weight = ledger()
    assert not book.read(book.locate(weight.view(2, 3, COLUMNS)), 1, torch.tensor([2, 4, 6], dtype=torch.int32), READ)
    assert book.usage["w"].others == [("mm", "here")]


def test_one_weight_under_two_names_is_one_however_it_was_tied():
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS))
    again = nn.Parameter(torch.empty(0))
    again.data = weight.data
    book = Ledger(model(a=weight, b=weight, c=again))
    assert book.aliases == {"a": ["a", "b", "c"]}
    assert [book.canonical(name) for name in "abc"] == ["a"] * 3
    assert place(weight) == place(again)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (lambda w: w.detach()[1:], "b and a share memory without being the same; clone one of them"),
        (lambda w: w.detach().view(COLUMNS, ROWS), "b and a share memory without being the same; clone one of them"),
        (lambda w: torch.randn(COLUMNS, ROWS).T, "b is a view of a larger tensor, or transposed; make it contiguous"),
        (lambda w: torch.randn(9, 3)[1:], "b is a view of a larger tensor, or transposed; make it contiguous"),
    ],
)
def test_parameters_whose_views_could_not_be_told_apart_are_refused(second, words):
    first = nn.Parameter(torch.randn(ROWS, COLUMNS))
    with pytest.raises(TracingError, match=words):
        Ledger(model(a=first, b=second(first)))
