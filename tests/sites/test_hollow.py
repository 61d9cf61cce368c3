"""Hollow copies keep a model's structure: what is one weight stays one, whatever made it so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashnorm.errors import TracingError
from flashnorm.sites.audit import audit
from flashnorm.sites.hollow import REAL_LIMIT, HollowMode, hollow_construction, hollow_copy, is_hollow
from flashnorm.sites.transforms import audit_fully
from tests.sites.small import WIDTH, after_fold, settled

VOCABULARY = 12
IDS = torch.arange(10).view(2, 5)


class Tied(nn.Module):
    """A head that is tied to the embedding in one of several ways."""

    def __init__(self, how: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        settled(self)
        if how == "object":
            self.head.weight = self.embedding.weight
        elif how == "storage":
            self.head.weight.data = self.embedding.weight.data
        elif how == "view":
            self.head.weight.data = self.embedding.weight.data.view(VOCABULARY, WIDTH)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)))


@pytest.mark.parametrize("how", ["object", "storage", "view"])
def test_a_tied_head_is_seen_however_it_was_tied(how):
    model = Tied(how)
    (site,) = audit(model, inputs={"x": IDS}).sites
    assert [(b.kind, b.remedy) for b in site.blockers] == [("tied", "--untie")]
    report, error = after_fold(model, IDS)
    assert report.folded == []
    assert error == 0


@pytest.mark.parametrize("how", ["object", "storage", "view"])
def test_untying_parts_them_however_they_were_tied(how):
    (site,) = audit(Tied(how), inputs={"x": IDS}, untie=True).sites
    assert site.foldable


def test_a_tied_embedding_that_the_inputs_pass_by_still_counts():
    class Embedded(Tied):
        def forward(self, x=None, embedded=None):
            return self.head(self.norm(self.embedding(x) if embedded is None else embedded))

    model = Embedded("object")
    (site,) = audit(model, inputs={"embedded": torch.randn(2, 5, WIDTH)}).sites
    assert [(b.kind, b.remedy) for b in site.blockers] == [("unseen", "--untie")]
    assert "head.weight is tied to embedding.weight, which the trace never ran" in site.reason
    assert audit(Embedded("no"), inputs={"embedded": torch.randn(2, 5, WIDTH)}).sites[0].foldable


def test_an_untied_head_is_folded():
    report, error = after_fold(Tied("no"), IDS)
    assert report.folded == ["norm"]
    assert error < 1e-5


def test_a_buffer_that_is_a_parameter_stays_it():
    model = Tied("no")
    model.embedding.register_buffer("mirror", model.head.weight.data)
    copied = hollow_copy(model)
    assert copied.embedding.mirror.data_ptr() == copied.head.weight.data_ptr()


@pytest.mark.parametrize("part", [lambda w: w[2:], lambda w: w.view(WIDTH, VOCABULARY).t()])
def test_parameters_that_overlap_in_part_are_refused(part):
    model = Tied("no")
    model.head.weight.data = part(model.embedding.weight.data)
    with pytest.raises(TracingError, match=r"share memory without being the same; clone one of them"):
        hollow_copy(model)


def test_neighbours_in_one_storage_are_parted():
    model, flat = Tied("no"), torch.randn(2, VOCABULARY, WIDTH)
    model.embedding.weight.data, model.head.weight.data = flat[0], flat[1]
    report, error = after_fold(model, IDS)
    assert report.folded == ["norm"]
    assert error < 1e-5


def test_a_transposed_parameter_keeps_its_axes():
    model = Tied("no")
    model.head.weight.data = torch.randn(WIDTH, VOCABULARY).t()
    report, error = after_fold(model, IDS)
    assert report.folded == ["norm"]
    assert error < 1e-5


def test_only_large_tensors_are_hollow_and_full_dtypes_become_float32():
    model = nn.Module()
    model.large = nn.Parameter(torch.zeros(REAL_LIMIT + 1, dtype=torch.bfloat16))
    model.small = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float16))
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    copied = hollow_copy(model)
    assert is_hollow(copied.large)
    assert copied.small.tolist() == [2.0] * 3
    assert [p.dtype for p in copied.parameters()] == [torch.float32, torch.float32, torch.int8]
    assert model.small.dtype == torch.float16


# Model code asks a weight for its device and puts activations there: they must not become hollow as the weight is.
ON_ITS_DEVICE = {
    "sent to the device": lambda x, w: x.to(w.device),
    "sent to the weight": lambda x, w: x.to(w),
    "of the weight's type": lambda x, w: x.type_as(w),
    "copied": lambda x, w: torch.empty_like(x, device=w.device).copy_(x),
    "made": lambda x, w: torch.arange(x.numel(), device=w.device).view(x.shape),
    "made beside another": lambda x, w: x.new_zeros(x.shape, device=w.device),
}


@pytest.mark.parametrize("what", ON_ITS_DEVICE)
def test_activations_on_the_device_of_a_hollow_weight_are_real(what):
    x, weight = torch.randn(2, 3), torch.empty(3, 3, device="meta")
    with HollowMode():
        put = ON_ITS_DEVICE[what](x, weight)
    assert not is_hollow(put)
    if what not in ("made", "made beside another"):
        assert torch.equal(put, x)
    assert not put.isnan().any()


def test_a_weight_that_is_sent_to_the_device_of_an_activation_stays_hollow():
    x, weight = torch.randn(2, 3), torch.empty(3, 3, device="meta")
    with HollowMode():
        assert is_hollow(weight.to(x.device, torch.float16))


def test_a_model_that_sends_its_inputs_to_its_weights_is_audited():
    class Sends(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(REAL_LIMIT // WIDTH + 1, WIDTH)
            self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x):
            return self.head(self.norm(self.embedding(x.to(self.embedding.weight.device))))

    (verdicts,) = audit_fully(Sends(), inputs={"x": IDS}).transforms.values()
    assert (verdicts.fold.word, verdicts.defer.word) == ("yes", "yes")


def test_a_norm_of_a_hollow_weight_is_not_held_for_what_cannot_be_seen():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(REAL_LIMIT // WIDTH + 1, WIDTH))
            self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.linear(self.norm(self.queries)) @ x.transpose(-1, -2)

    (verdicts,) = audit_fully(Queries(), inputs={"x": torch.randn(2, 5, WIDTH)}).transforms.values()
    assert verdicts.fold.word == "yes"
    assert "hollow" in verdicts.cancel.reason


def test_tables_of_places_are_real_however_large():
    size = REAL_LIMIT + 1
    with hollow_construction():
        assert not is_hollow(torch.ones(size, dtype=torch.long))
        assert not torch.empty(size, dtype=torch.long).any()  # not what lay in that memory before
        assert is_hollow(torch.zeros(size, dtype=torch.int32))
    model = nn.Module()
    model.register_buffer("known", torch.arange(size))
    model.register_buffer("unknown", torch.empty(3, dtype=torch.long, device="meta"))
    copied = hollow_copy(model)
    assert torch.equal(copied.known, model.known)
    assert copied.known.data_ptr() != model.known.data_ptr()
    assert copied.unknown.tolist() == [0] * 3
