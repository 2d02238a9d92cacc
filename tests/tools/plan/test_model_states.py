"""Bytes of parameters, gradients and optimizer states on a rank."""

from __future__ import annotations

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.tools.plan.model_states import States, buffer_states, data_ranks, exact_states, rank_states
from megatron_gspo.tools.plan.parameters import (
    Parameter,
    chunk_parameters,
    total_parameters,
)
from tests.support.model_shapes import SMALL, shape_of


@pytest.mark.parametrize(
    "sizes", [dict(tp=4, pp=3, ep=8, etp=1), dict(tp=2, pp=1, ep=16, etp=2), dict(tp=1, pp=2, ep=1, etp=1)]
)
def test_ranks_add_up_to_the_model(sizes: dict[str, int]) -> None:
    """Over all ranks each dense weight is there once a replica: cut tensors add up, whole ones are copies."""
    shape, tp, pp = shape_of(SMALL), sizes["tp"], sizes["pp"]
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=sizes["etp"],
    )  # fmt: skip
    whole = {"input_layernorm", "q_layernorm", "k_layernorm", "pre_mlp_layernorm", "router", "final_layernorm"}
    total = 0
    for stage in range(pp):
        for part in chunk_parameters(shape, parallel, stage):
            copies = sizes["ep"] * sizes["etp"] if part.expert else 1 if part.name in whole else tp
            total += part.count * copies
    assert total == total_parameters(shape)


def test_a_buffer_by_hand() -> None:
    # backwards: c at 0..100, b at 128..138, a at 192..392; end at a multiple of lcm(3, 128) = 384: 768
    parts = [Parameter("a", 200), Parameter("b", 10), Parameter("c", 100)]
    states = [buffer_states(parts, True, 3, place, 2) for place in range(3)]
    assert {(s.weights, s.gradients) for s in states} == {(2 * 768, 4 * 768)}
    # shares of 256: rank 0 has c, b and 64 of a; rank 1 the other 136; rank 2 padding only. 12 bytes each, 4 a tensor
    assert [s.optimizer for s in states] == [12 * 174 + 12, 12 * 136 + 4, 0]
    whole = buffer_states(parts, False, 3, 0, 4)
    assert whole == States(4 * 310, 4 * 310, 8 * 310 + 12)


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    parts = [Parameter("embedding", 70, shared=True), Parameter("a", 10), Parameter("b", 10)]
    # b 0..10, a 64..74, then the embedding would start at 128: bucket of 128; its own from 128 to 256
    first, second = (buffer_states(parts, True, 2, place, 4) for place in range(2))
    assert first.weights == 4 * 256
    assert first.optimizer == 8 * (10 + 64) + 8 and second.optimizer == 8 * (10 + 6) + 8


def test_a_bucket_ends_where_it_is_full() -> None:
    parts = [Parameter("a", 200), Parameter("b", 10), Parameter("c", 100)]
    # c at 0..100 and b at 128..138 have 138 elements: padded to 256; a at 256..456: padded to 512
    first, second = (buffer_states(parts, True, 2, place, 2, 101) for place in range(2))
    assert first.weights == 2 * 512
    # shares of 128 of each bucket: c and 128 of a; b and 72 of a
    assert (first.optimizer, second.optimizer) == (12 * 228 + 8, 12 * 82 + 8)


@pytest.mark.parametrize("gpus, tp, pp, ep", [(32, 2, 4, 8), (64, 1, 1, 16), (16, 4, 2, 2)])
def test_the_fast_states_bound_the_exact_ones(gpus: int, tp: int, pp: int, ep: int) -> None:
    shape = shape_of(SMALL)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
    )
    dense, expert = data_ranks(parallel, gpus)
    assert (dense, expert) == (gpus // tp // pp, gpus // ep // pp)
    fast = rank_states(shape, parallel, gpus, 0, 2)
    places = [(0, 0), (dense - 1, expert - 1), (dense // 2, expert // 2)]
    for place in places:
        exact = exact_states(shape, parallel, gpus, 0, 2, place)
        assert (exact.weights, exact.gradients) == (fast.weights, fast.gradients)
        assert exact.optimizer <= fast.optimizer + 4 * 2000  # step counts lie unevenly
    assert fast.optimizer == pytest.approx(exact.optimizer, rel=1e-3)
