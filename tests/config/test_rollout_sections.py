"""What the sections `rollout` and `routing` refuse and resolve to."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gspo.config import SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {"n_samples_per_prompt": 0},
        {"max_response_length": 0},
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_parameters_that_no_engine_supports(fields: dict[str, Any]) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: ") as caught:
        SamplingParams(**fields)
    assert "\n" not in str(caught.value)
