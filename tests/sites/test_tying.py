"""Ties are found by memory, and parted in the model and in the config alike."""

from __future__ import annotations

import torch
from torch import nn
from transformers import Gemma3Config, LlamaConfig

from flashnorm.sites.tying import has_tied_head, tie_flags, tied_groups, untie_head


class Model(nn.Module):
    """Two embeddings and two heads of one shape, none of them tied."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(6, 4), nn.Embedding(6, 4)
        self.head, self.other = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)


def test_nothing_is_tied():
    model = Model()
    assert not has_tied_head(model)
    assert untie_head(model) == {}
    assert all(len(names) == 1 for names in tied_groups(model))


def test_two_embeddings_alone_are_no_tied_head():
    model = Model()
    model.second.weight = model.first.weight
    assert ["first.weight", "second.weight"] in tied_groups(model)
    assert untie_head(model) == {}


def test_every_head_gets_a_weight_of_its_own():
    model = Model()
    model.head.weight = model.first.weight
    model.other.weight.data = model.first.weight.data
    embedding = model.first.weight
    assert untie_head(model) == {"head.weight": "first.weight", "other.weight": "first.weight"}
    assert model.first.weight is embedding
    assert not has_tied_head(model)
    assert all(len(names) == 1 for names in tied_groups(model))


def test_equal_values_are_no_tie():
    model = Model()
    with torch.no_grad():
        model.head.weight.copy_(model.first.weight)
    assert not has_tied_head(model)


def test_a_flag_that_is_a_class_default_is_written_down():
    config = LlamaConfig(tie_word_embeddings=True)
    assert tie_flags(config, {"model_type": "llama"}) == {("tie_word_embeddings",): False}


def test_a_nested_flag_is_changed_where_the_file_has_its_table_and_nowhere_else():
    config = Gemma3Config()
    config.text_config.tie_word_embeddings = True
    nested = ("text_config", "tie_word_embeddings")
    assert tie_flags(config, config.to_dict())[nested] is False
    # Alone in a new table, the flag would take the place of all the values that the class derives without one.
    assert nested not in tie_flags(config, {"model_type": "gemma3"})
    assert nested not in tie_flags(config, {"model_type": "gemma3", "text_config": None})
