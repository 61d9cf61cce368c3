from __future__ import annotations

from flashnorm.checkpoint.plan import changed


def test_a_config_is_changed_in_a_copy_and_keeps_its_order():
    config = {"z": 1, "text": {"tie": True, "size": 4}, "a": 2}
    new = changed(config, {("text", "tie"): False, ("a",): 3})
    assert new == {"z": 1, "text": {"tie": False, "size": 4}, "a": 3}
    assert list(new) == ["z", "text", "a"]
    assert config["text"]["tie"] is True


def test_a_table_that_the_config_lacks_is_made():
    assert changed({}, {("flashnorm", "mode"): "strict"}) == {"flashnorm": {"mode": "strict"}}
