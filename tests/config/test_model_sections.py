"""Sizes that are derived from the sections `model` and `parallel`."""

from __future__ import annotations

from megatron_gspo.config import ParallelConfig


def test_sizes_derived_from_a_layout() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=2
    )
    assert parallel.data_parallel_size(16) == 2
    assert (parallel.use_sequence_parallel, parallel.expert_tensor_size) == (True, 1)
    assert (parallel.sequence_multiple, parallel.total_multiple) == (4, 8)
    assert (ParallelConfig().sequence_multiple, ParallelConfig().total_multiple) == (1, 1)


def test_extra_layers_of_the_pipeline_split() -> None:
    assert ParallelConfig().extra_pipeline_layers == 0
    counted = ParallelConfig(
        account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True
    )
    assert counted.extra_pipeline_layers == 2


def test_sequence_parallelism_follows_tensor_parallelism_unless_it_is_set() -> None:
    assert not ParallelConfig().use_sequence_parallel
    off = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    assert not off.use_sequence_parallel and off.total_multiple == 1
