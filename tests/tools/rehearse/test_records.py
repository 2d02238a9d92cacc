"""Records of a rehearsal as JSON and back."""

import dataclasses
import json
from pathlib import Path

from megatron_gspo.tools.rehearse.records import decode_record, encode_record, read_record, write_record

from .synthetic_records import SITE, record


def test_json_gives_back_the_same_record(tmp_path: Path) -> None:
    path = tmp_path / "rank.json"
    write_record(record(), path)
    assert read_record(path) == record()


def test_a_record_without_a_checkpoint_survives() -> None:
    without = dataclasses.replace(record(), checkpoint=None)
    assert decode_record(json.loads(json.dumps(encode_record(without)))) == without


def test_call_sites_are_stored_once() -> None:
    assert json.dumps(encode_record(record())).count(SITE[0]) == 1


def test_only_made_up_values_are_no_defects() -> None:
    finding = record().findings[0]
    assert finding.is_defect
    assert not dataclasses.replace(finding, kind="made_up_value").is_defect
