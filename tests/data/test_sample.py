import json

import numpy as np
import pytest

from megatron_gspo.data.sample import Prompt, version_spans
from tests.support.samples import make_prompt, make_sample


def test_lengths_and_views():
    sample = make_sample(2, 3)
    assert (sample.length, sample.response_length) == (5, 3)
    assert sample.response_ids.tolist() == sample.tokens[2:].tolist()
    sample.check()
    make_sample(1, 0).check()
    make_sample(
        1, 0, routed_experts=np.zeros((0, 2, 8), np.uint8), missing_routes=np.zeros(0, bool)
    ).check()
    make_sample(2, 3, routed_experts=np.zeros((4, 2, 8), np.uint16)).check()
    rows = make_sample(2, 5, mask=[True, True, False, False, True], row_lengths=np.array([4, 3]))
    rows.check()
    assert (rows.num_rows, sample.num_rows) == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2, 3]}, "tokens is list; it must be a 1-d int64 numpy array"),
        ({"tokens": np.array([1, 2, -3, 4, 5])}, "negative id -3"),
        ({"tokens": np.arange(5, dtype=np.int32)}, "1-d int32 array"),
        ({"prompt_length": 0}, "prompt_length is 0; use 1 to 5"),
        ({"prompt_length": 6}, "prompt_length is 6; use 1 to 5"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'; use one of stop, length, abort"),
        ({"loss_mask": np.ones(3)}, "loss_mask is a 1-d float64 array; it must be a bool"),
        ({"loss_mask": np.ones(2, bool)}, "loss_mask has shape (2,); the response has 3 tokens"),
        ({"rollout_log_probs": np.zeros(3)}, "rollout_log_probs is a 1-d float64 array"),
        ({"old_log_probs": np.array([0, np.nan, 0], np.float32)}, "old_log_probs has 1 non-finite"),
        (
            {"ref_log_probs": np.array([0, 0.5, 0], np.float32)},
            "ref_log_probs has 0.5; a log-probability is at",
        ),
        ({"advantages": np.array([0, np.inf, 0], np.float32)}, "advantages has 1 non-finite"),
        (
            {"routed_experts": np.zeros((5, 2, 8), np.uint8)},
            "routed_experts has 5 rows for 5 tokens; give 4",
        ),
        (
            {"routed_experts": np.zeros((4, 2, 8), np.int32)},
            "routed_experts is a 3-d int32 array; make it unsigned",
        ),
        (
            {"routed_experts": np.zeros((4, 16), np.uint8)},
            "a 2-d uint8 array; it must be a [tokens - 1, layers, k]",
        ),
        (
            {"routed_experts": [[[1]]] * 4},
            "routed_experts is list; it must be a [tokens - 1, layers, k]",
        ),
        (
            {"missing_routes": np.zeros(4, bool)},
            "missing_routes is given without routed_experts; give both or neither",
        ),
        (
            {"routed_experts": np.zeros((4, 2, 8), np.uint16), "missing_routes": np.zeros(5, bool)},
            "missing_routes is a 1-d bool array of shape [5]; it must be a [4] bool numpy array",
        ),
        (
            {
                "routed_experts": np.zeros((4, 2, 8), np.uint16),
                "missing_routes": np.zeros(4, np.int8),
            },
            "missing_routes is a 1-d int8 array of shape [4]; it must be a [4] bool numpy array",
        ),
        (
            {"token_versions": np.array([0, 1, 1])},
            "token_versions is a 1-d int64 array; it must be a int32",
        ),
        (
            {"token_versions": np.zeros(4, np.int32)},
            "token_versions has shape (4,); the response has 3 tokens",
        ),
        (
            {"token_versions": np.array([5, 4, 5], np.int32), "weight_version": 5},
            "the oldest of token_versions is 4, weight_version is 5; weight_version is the oldest",
        ),
        ({"row_lengths": [2, 3]}, "row_lengths is list; it must be a 1-d int64"),
        ({"row_lengths": np.array([3, 3])}, "row_lengths is [3, 3]; it must be positive numbers"),
        ({"row_lengths": np.array([5, 0])}, "row_lengths is [5, 0]; it must be positive numbers"),
        (
            {"row_lengths": np.array([1, 4])},
            "the first row has 1 tokens; it must have the prompt's 2",
        ),
        (
            {"row_lengths": np.array([3, 2])},
            "loss_mask is True at the first token of a row, which nothing predicts",
        ),
    ],
)
def test_check_names_the_field_the_value_and_the_fix(change, message):
    sample = make_sample(2, 3)
    for name, value in change.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError) as error:
        sample.check()
    assert message in str(error.value) and str(error.value).startswith("sample 0/0: ")
    assert "\n" not in str(error.value)


def test_check_forgives_non_finite_values_where_asked_or_masked():
    sample = make_sample(2, 3, mask=[True, False, True])
    sample.rollout_log_probs[1] = np.nan
    sample.check()
    sample.rollout_log_probs[0] = np.nan
    sample.check(finite=False)
    with pytest.raises(ValueError, match="1 non-finite"):
        sample.check()


def test_prompt_check():
    make_prompt().check()
    with pytest.raises(ValueError, match="prompt 7: token_ids is empty"):
        Prompt(7, np.array([], dtype=np.int64), "").check()
    with pytest.raises(ValueError, match="prompt 7: token_ids is list"):
        Prompt(7, [1, 2], "").check()


def test_record_is_json_and_holds_no_nan():
    sample = make_sample(2, 3, text="4", metadata={"a": (1, np.float32(2)), "b": float("inf")})
    record = sample.to_record(make_prompt())
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "prompt_index": 0,
        "sample_index": 0,
        "reward": None,
        "finish_reason": "stop",
        "prompt_length": 2,
        "response_length": 3,
        "weight_version": 0,
        "response": "4",
        "metadata": {"a": [1, 2.0], "b": None},
        "prompt": "2+2=",
        "answer": "4",
    }
    sample.reward = 0.5
    assert sample.to_record()["reward"] == 0.5 and "prompt" not in sample.to_record()


def test_versions_of_tokens():
    sample = make_sample(2, 5, mask=[True, True, False, True, True], weight_version=3)
    assert "token_versions" not in sample.to_record()
    sample.token_versions = np.array([4, 3, 3, 3, 5], np.int32)
    sample.check()
    assert sample.to_record()["token_versions"] == [[4, 1], [3, 3], [5, 1]]
    assert version_spans(np.zeros(0, np.int32)) == []
    assert version_spans(np.array([2, 2, 1, 2], np.int32)) == [[2, 2], [1, 1], [2, 1]]
    make_sample(1, 0, weight_version=7, token_versions=np.zeros(0, np.int32)).check()
