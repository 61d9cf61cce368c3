from __future__ import annotations

import json

from tools.readme_example import README, RECORD, rendered, with_example


def test_the_example_is_generated_from_its_record():
    assert README.read_text() == with_example(README.read_text())
    assert rendered() in README.read_text()


def test_another_record_gives_another_example(tmp_path):
    table = json.loads(RECORD.read_text())
    table["verify"]["logits"]["candidate_relative_error"] = 1.5
    (tmp_path / "record.json").write_text(json.dumps(table))
    assert rendered(tmp_path / "record.json") != rendered()
