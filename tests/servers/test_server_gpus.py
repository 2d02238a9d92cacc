"""The GPUs that started servers get."""

from __future__ import annotations

import pytest

from megatron_gspo.config import SGLangConfig
from megatron_gspo.errors import InputError
from megatron_gspo.rollout.sglang.sglang_args import BASE_GPU, gpus_per_server
from megatron_gspo.servers.server_gpus import first_server_gpu


def first(args=(), servers=1, *, trainer=2, visible=8, colocated=False) -> int:
    config = SGLangConfig(num_servers=servers, server_args=args, colocated=colocated)
    return first_server_gpu(
        config,
        gpus_per_server(args),
        trainer_gpus=trainer,
        visible_gpus=visible,
        option_name=BASE_GPU,
    )


def test_servers_get_gpus_that_no_rank_uses():
    assert first() == 2
    assert first(servers=6) == 2
    assert first(("--tp", "3"), servers=2) == 2
    assert first(("--base-gpu-id", "5")) == 5


def test_colocated_servers_share_the_trainers_gpus():
    assert first(colocated=True) == 0
    assert first(("--base-gpu-id=1",), colocated=True) == 1


def test_a_gpu_of_the_trainer_is_refused():
    problem = (
        "--base-gpu-id 1: the trainer uses the GPUs 0 to 1; set --base-gpu-id to 2 or more, or"
        " sglang.colocated"
    )
    with pytest.raises(InputError, match=problem):
        first(("--base-gpu-id", "1"))


def test_one_gpu_is_too_few_for_trainer_and_server():
    with pytest.raises(
        InputError,
        match="num_servers=1: the servers need the GPUs 1 to 1, this node has 1; use fewer",
    ):
        first(trainer=1, visible=1)
    with pytest.raises(
        InputError, match="num_servers=2: the servers need the GPUs 2 to 9, this node has 8"
    ):
        first(("--tp", "4"), servers=2)
    assert first(trainer=1, visible=1, colocated=True) == 0


def test_an_index_that_is_no_number():
    with pytest.raises(InputError, match="--base-gpu-id first: must be a GPU's index"):
        first(("--base-gpu-id", "first"))
