"""Megatron to Hugging Face: names, files, type; checkpoints of another model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.tools.convert.to_hugging_face import as_stored, to_hugging_face
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader


@pytest.fixture(scope="module")
def reader(converted) -> DistributedReader:
    return DistributedReader(converted.megatron)


def test_without_a_single_file_in_the_source_shards_are_at_most_as_large_as_asked(
    converted, tmp_path
):
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(converted.hugging_face / "config.json", source)
    limit = 15_000
    out = to_hugging_face(
        converted.megatron,
        tmp_path / "out",
        converted.metadata.chunks,
        source,
        dtype=torch.bfloat16,
        max_shard_bytes=limit,
    )
    index = json.loads((out / INDEX).read_text())
    expected = load_file(converted.hugging_face / SINGLE)
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(
        2 * tensor.numel() for tensor in expected.values()
    )
    files = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files.keys() and len(files) > 1
    for tensors in files.values():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
    exported = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert all(torch.equal(exported[name], tensor.bfloat16()) for name, tensor in expected.items())


def test_a_vocabulary_may_be_stored_with_more_padding_but_not_with_less(converted, reader):
    chunks = list(converted.metadata.chunks)
    at = next(i for i, chunk in enumerate(chunks) if chunk.part.rule.is_vocabulary)
    rows, *rest = chunks[at].whole
    fewer = replace(chunks[at], whole=(rows - 1, *rest))
    assert as_stored(reader, [*chunks[:at], fewer, *chunks[at + 1 :]])[at] == fewer
    more = replace(chunks[at], whole=(rows + 1, *rest))
    with pytest.raises(ModelError, match=chunks[at].key):
        as_stored(reader, [*chunks[:at], more, *chunks[at + 1 :]])


def test_a_checkpoint_of_two_types_needs_a_choice(converted, monkeypatch, tmp_path: Path):
    first = converted.metadata.chunks[0].key
    true = DistributedReader.dtype
    monkeypatch.setattr(
        DistributedReader,
        "dtype",
        lambda self, key: torch.bfloat16 if key == first else true(self, key),
    )
    with pytest.raises(ModelError, match="choose one with --dtype"):
        to_hugging_face(
            converted.megatron, tmp_path / "out", converted.metadata.chunks, converted.hugging_face
        )
    assert not list(tmp_path.iterdir())
