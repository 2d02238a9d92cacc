"""Sizes of a workload and a cluster that contradict each other are refused."""

import dataclasses

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.plan.hardware import find_gpu
from megatron_gspo.tools.plan.workload import Cluster, Workload, check_cluster, check_workload

WORK = Workload(response_length=100, prompt_length=20, rollout_batch_size=4, n_samples=2, global_batch_size=4)


def test_lengths_and_counts():
    assert (WORK.sequences, WORK.longest, WORK.mean_length(0.5)) == (8, 120, 70.0)
    check_workload(WORK, 120)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_samples": 0}, "--n-samples 0: must be at least 1"),
        ({"global_batch_size": 3}, "--global-batch-size 3: does not divide the 8 sequences"),
        ({"response_length": 101}, "--response-length 101: .* 121 tokens .* 120 positions"),
    ],
)
def test_a_workload_that_cannot_be(change, message):
    with pytest.raises(InputError, match=message):
        check_workload(dataclasses.replace(WORK, **change), 120)


@pytest.mark.parametrize(
    "engine, serving", [("sglang", 8), ("vllm", 8), ("colocated", 16), ("embedded", 16), ("none", 0)]
)
def test_gpus_that_generate(engine, serving):
    cluster = Cluster(find_gpu("h200"), 16, engine, engine_gpus=8)
    assert cluster.serving == serving
    check_cluster(cluster)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpus": 12}, "--gpus 12: nodes have 8 GPUs; .* as 8"),
        ({"gpus": 0}, "--gpus 0"),
        ({"engine_gpus": 0}, "--engine-gpus 0"),
        ({"engine_tensor": 3}, "--engine-tensor 3: does not divide the 8 GPUs"),
    ],
)
def test_a_cluster_that_cannot_be(change, message):
    with pytest.raises(InputError, match=message):
        check_cluster(dataclasses.replace(Cluster(find_gpu("h200"), 16, "sglang", engine_gpus=8), **change))
