"""The GPUs that started SGLang servers get."""

from __future__ import annotations

import pytest

from megatron_gspo.rollout.sglang.sglang_args import gpus_per_server


@pytest.mark.parametrize(
    "args, gpus",
    [
        ((), 1),
        (("--tp", "4"), 4),
        (("--tp-size=2", "--pp", "2", "--dp-size", "2"), 8),
        (("--tp", "4", "--dp", "4", "--enable-dp-attention"), 4),
    ],
)
def test_gpus_per_server(args, gpus):
    assert gpus_per_server(args) == gpus
