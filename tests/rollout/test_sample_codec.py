"""Samples as bytes and back."""

import numpy as np
import pytest

from megatron_gspo.rollout.sample_codec import decode_samples, encode_samples
from tests.support.random_samples import assert_same, random_sample


@pytest.mark.parametrize("count", [0, 1, 40])
def test_samples_survive_the_wire(count):
    rng = np.random.default_rng(count)
    samples = [random_sample(rng, i) for i in range(count)]
    wire = np.frombuffer(bytearray(encode_samples(samples, range(10, 10 + count))), dtype=np.uint8)
    decoded = decode_samples(wire)
    assert [position for position, _ in decoded] == list(range(10, 10 + count))
    for (_, after), before in zip(decoded, samples, strict=True):
        assert_same(after, before)
        assert after.routed_experts is None or after.routed_experts.flags.aligned


def test_bytes_of_another_version_are_refused():
    wire = np.frombuffer(bytearray(encode_samples([], [])), dtype=np.uint8).copy()
    assert decode_samples(wire) == []
    wire[0] ^= 1
    with pytest.raises(ValueError, match="samples were encoded by another version"):
        decode_samples(wire)
