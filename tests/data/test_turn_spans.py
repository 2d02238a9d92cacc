"""Turns in a sample's metadata."""

from megatron_gspo.data.turn_spans import Span, spans, with_spans
from tests.support.samples import make_sample


def test_spans_survive_the_metadata_and_are_plain_data():
    turns = [Span(0, 3, 0.5), Span(5, 6, -1.0)]
    metadata = with_spans(turns)
    assert metadata == {
        "turns": [{"start": 0, "end": 3, "reward": 0.5}, {"start": 5, "end": 6, "reward": -1.0}]
    }
    assert spans(make_sample(1, 6, metadata=metadata)) == turns


def test_a_sample_of_one_response_has_no_spans():
    assert spans(make_sample(1, 2, metadata={"other": 1})) == []
