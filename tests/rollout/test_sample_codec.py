"""Samples as bytes and back."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_gspo.data.sample import stage_input
from megatron_gspo.rollout.sample_codec import decode_samples, encode_samples
from tests.support.random_samples import assert_same, random_sample


@pytest.mark.parametrize("count", [0, 1, 40])
def test_samples_survive_the_wire(count):
    rng = np.random.default_rng(count)
    samples = [random_sample(rng, i) for i in range(count)]
    wire = np.frombuffer(bytearray(encode_samples(samples, range(10, 10 + count))), dtype=np.uint8)
    found = decode_samples(wire)
    assert [place for place, _ in found] == list(range(10, 10 + count))
    for (_, after), before in zip(found, samples, strict=True):
        assert_same(after, before)
        assert after.routed_experts is None or after.routed_experts.flags.aligned


def test_a_pipeline_stages_input_takes_no_bytes_for_what_it_lacks():
    rng = np.random.default_rng(3)
    samples = [stage_input(random_sample(rng, i), tokens=i % 2 == 0) for i in range(8)]
    wire = np.frombuffer(bytearray(encode_samples(samples, range(8))), dtype=np.uint8)
    for i, ((_, after), before) in enumerate(zip(decode_samples(wire), samples, strict=True)):
        assert_same(after, before)
        assert after.has_tokens == (i % 2 == 0)
    whole = encode_samples(
        [replace(sample, tokens=np.array(sample.tokens)) for sample in samples], range(8)
    )
    assert len(whole) - len(wire) == pytest.approx(
        8 * sum(sample.length for sample in samples[1::2]), abs=8
    )


def test_bytes_of_another_version_are_refused():
    wire = np.frombuffer(bytearray(encode_samples([], [])), dtype=np.uint8).copy()
    assert decode_samples(wire) == []
    wire[0] ^= 1
    with pytest.raises(ValueError, match="samples were encoded by another version"):
        decode_samples(wire)
