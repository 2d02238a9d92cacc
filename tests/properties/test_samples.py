"""Samples sent between ranks and stored in checkpoints are unchanged, bit for bit."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_gspo.data.sample import FINISH_REASONS, Sample
from megatron_gspo.rollout.sample_codec import decode_samples, encode_samples

PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # no half of a surrogate pair
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def samples(draw) -> Sample:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    floats = arrays.arrays(np.float32, response, elements=st.floats(width=32))
    rows = prompt + response - 1
    routes = draw(
        st.none()
        | st.tuples(st.sampled_from([np.uint8, np.uint16]), st.integers(1, 3), st.integers(1, 2)).flatmap(
            lambda s: arrays.arrays(s[0], (rows, *s[1:]))
        )
    )
    missing = None if routes is None else draw(st.none() | arrays.arrays(np.bool_, rows))
    return Sample(
        prompt_index=draw(st.integers(0, 2**40)),
        sample_index=draw(st.integers(0, 100)),
        tokens=draw(arrays.arrays(np.int64, prompt + response, elements=st.integers(0, 2**31))),
        prompt_length=prompt,
        loss_mask=draw(arrays.arrays(np.bool_, response)),
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        text=draw(words),
        weight_version=draw(st.integers(0, 2**40)),
        reward=draw(st.floats()),
        routed_experts=routes,
        missing_routes=missing,
        token_versions=draw(st.none() | arrays.arrays(np.int32, response)),
        metadata=draw(st.dictionaries(words, json_values, max_size=3)),
        **{name: draw(st.none() | floats) for name in PER_TOKEN},
    )


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(batch=st.lists(samples(), max_size=5))
def test_encoded_and_decoded(batch):
    wire = np.frombuffer(bytearray(encode_samples(batch, range(7, 7 + len(batch)))), dtype=np.uint8)
    found = decode_samples(wire)
    assert [place for place, _ in found] == list(range(7, 7 + len(batch)))
    for (_, got), sample in zip(found, batch, strict=True):
        for name in ("tokens", "loss_mask", "routed_experts", "missing_routes", "token_versions", *PER_TOKEN):
            assert same(getattr(got, name), getattr(sample, name)), name
        for name in (
            "prompt_index",
            "sample_index",
            "prompt_length",
            "finish_reason",
            "text",
            "weight_version",
        ):
            assert getattr(got, name) == getattr(sample, name), name
        assert np.float64(got.reward).tobytes() == np.float64(sample.reward).tobytes()
        assert json.dumps(got.metadata, sort_keys=True) == json.dumps(sample.metadata, sort_keys=True)
