"""What each rank sends: together the model, every tensor once; a rank receives only what it
sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megatron_gspo.mcore.train_step  # noqa: F401  the fork server of the tests imports it once
from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore import weight_sources
from megatron_gspo.mcore.hf_weights import load_weights
from megatron_gspo.mcore.model import build_model
from megatron_gspo.mcore.weight_sources import default_sources, export_source
from megatron_gspo.models import family_of, read_config
from tests.support.configs import model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.live_storages import LiveStorages
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

CASES = [  # of 4 ranks, and the sources
    ("moe", parallel(), (0,)),
    ("moe", parallel(tensor=2, pipeline=2), (0, 2)),
    ("moe", parallel(pipeline=2, expert=2), (0, 1, 2, 3)),
    ("moe", parallel(pipeline=2, virtual_pipeline=2, expert=2), (0, 1, 2, 3)),
    ("moe", parallel(expert=2), (0, 1)),
    ("moe", parallel(tensor=2, expert=2, expert_tensor=2), (0, 2)),
    ("moe", parallel(tensor=2, expert=2), (0, 1)),
    ("shared", parallel(tensor=2, expert=4), (0, 1, 2, 3)),
    ("gpt_oss", parallel(tensor=2, expert=2), (0,)),  # one tensor has all experts
    ("gpt_oss", parallel(pipeline=2, expert=2), (0, 2)),
    ("gpt_oss", parallel(tensor=2, expert=2, expert_tensor=2), (0,)),
    ("tied", parallel(tensor=2, pipeline=2), (0, 2)),
    ("dense", parallel(tensor=2, context=2), (0,)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """95 tokens: an odd vocabulary, which tensor-parallel ranks pad."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "moe": save_tiny_model(folder / "moe", vocab_size=95),
        "shared": save_tiny_model(folder / "shared", "shared"),
        "gpt_oss": save_tiny_model(folder / "gpt_oss", "gpt_oss"),
        "dense": save_tiny_model(folder / "dense", "dense"),
        "tied": save_tiny_model(folder / "tied", "dense", vocab_size=95, tie_word_embeddings=True),
    }


class OnlyGathers:
    """`torch.distributed` in place of the module's, with the bytes that this rank received from
    others.
    """

    def __init__(self) -> None:
        self.received = 0

    get_global_rank = staticmethod(dist.get_global_rank)
    get_world_size = staticmethod(dist.get_world_size)

    def gather(self, tensor: torch.Tensor, gather_list: Any = None, **given: Any) -> None:
        dist.gather(tensor, gather_list, **given)
        self.received += sum(buffer.nbytes for buffer in gather_list or []) - (
            tensor.nbytes if gather_list else 0
        )


@dataclass(frozen=True)
class Sent:
    """By one rank in one case; received: bytes from the other ranks."""

    sources: tuple[int, ...]
    tensors: list[tuple[str, torch.Tensor]]
    received: int


def send_in_every_case(rank: int, world_size: int, models: dict[str, str]) -> list[Sent]:
    cases = []
    for kind, layout, _ in CASES:
        groups = groups_of(layout)
        family, shape = family_of(read_config(models[kind]))
        chunks = build_model(shape, layout, model_config(), groups)
        load_weights(chunks, models[kind], family, shape, groups)
        for piece in (16 * 2**20, 3000):
            weight_sources.dist = spy = OnlyGathers()
            sources = default_sources(groups, family)
            tensors = []
            for source in sources:
                stream = export_source(source, chunks, family, shape, groups, piece=piece)
                of_source = [(name, tensor.clone()) for name, tensor in stream]
                assert not of_source or source.rank == rank
                tensors += of_source
            cases.append(Sent(tuple(source.rank for source in sources), tensors, spy.received))
            weight_sources.dist = dist
    return cases


def test_the_sources_send_every_tensor_once_and_receive_no_other(models):
    by_rank = run_distributed(send_in_every_case, 4, models)
    for number, ranks in enumerate(zip(*by_rank, strict=True)):
        kind, layout, sources = CASES[number // 2]
        truth = load_file(Path(models[kind]) / "model.safetensors")
        pairs = [pair for sent in ranks for pair in sent.tensors]
        assert sorted(name for name, _ in pairs) == sorted(truth), layout
        assert all(torch.equal(tensor, truth[name]) for name, tensor in pairs), layout
        for rank, sent in enumerate(ranks):
            assert sent.sources == sources and bool(sent.tensors) == (rank in sources), layout
            whole = sum(tensor.nbytes for _, tensor in sent.tensors)
            padding = 2 * 4 * 64 * 64  # of a vocabulary
            shards = layout.tensor_model_parallel_size * (
                layout.expert_model_parallel_size if kind == "gpt_oss" else 1
            )
            assert sent.received <= whole * (1 - 1 / shards) + padding, (layout, rank)


def memory_of_a_stream(
    rank: int, world_size: int, path: str, layout: ParallelConfig
) -> tuple[int, int, int]:
    """Bytes: the most that a source's stream holds at once, the largest parameter's whole ones, all
    that it sends.

    The least of three streams: a busy machine lets gloo's threads hold a tensor for longer, and
    nothing holds less.
    """
    groups = groups_of(layout)
    family, shape = family_of(read_config(path))
    chunks = build_model(shape, layout, model_config(), groups)
    largest = 2 * max(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    peaks = []
    for _ in range(3):
        total = 0
        with LiveStorages() as live:
            for source in default_sources(groups, family):
                for _, tensor in export_source(source, chunks, family, shape, groups, piece=8192):
                    total += tensor.nbytes
        peaks.append(live.peak)
    return min(peaks), largest, total


def test_a_stream_holds_little(models):
    ranks = run_distributed(
        memory_of_a_stream, 2, models["moe"], parallel(tensor=2, expert_tensor=2)
    )
    peak, largest, total = ranks[0]
    assert 0 < peak <= 3 * max(8192, largest) < total / 2
    assert ranks[1][2] == 0
