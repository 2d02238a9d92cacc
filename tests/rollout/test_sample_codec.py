"""Samples as bytes and back."""

from dataclasses import replace

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


@pytest.mark.parametrize(("largest", "pair_bytes"), [(2**18 - 1, 6), (2**18, 8)])
def test_most_likely_ids_take_6_bytes_of_a_pair_in_vocabularies_of_18_bits(largest, pair_bytes):
    plain = random_sample(np.random.default_rng(3), 0)
    count, k = plain.response_length, 16
    ids = np.arange(largest, largest - count * k, -1, dtype=np.int32).reshape(count, k)
    log_probs = -np.random.default_rng(1).exponential(4, (count, k)).astype(np.float32)
    plain = replace(plain, rollout_top_ids=None, rollout_top_log_probs=None)
    sample = replace(plain, rollout_top_ids=ids, rollout_top_log_probs=log_probs)
    wire = encode_samples([sample], [0])
    assert len(wire) - len(encode_samples([plain], [0])) == pair_bytes * count * k
    [(_, decoded)] = decode_samples(np.frombuffer(bytearray(wire), dtype=np.uint8))
    assert_same(decoded, sample)
