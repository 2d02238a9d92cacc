"""The checkpoints that servers read: atomic, the newest kept, the others removed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_gspo.errors import DiskError
from megatron_gspo.rollout.sglang.sglang_api import SGLangAPI
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import INDEX, DiskTransport

STREAM = [
    ("a", torch.randn(3, 5)),
    ("b", torch.randn(60).bfloat16()),
    ("c", torch.arange(4)),
    ("d", torch.randn(())),
]


def write(transport: DiskTransport, version: str, parts: Sequence[list] = (STREAM,)) -> None:
    transport.prepare(version)
    for number, stream in enumerate(parts):
        source = DiskTransport(SGLangAPI(), transport._directory)
        source.begin(version, number)
        for bucket in buckets(stream, 64):
            source.store(bucket)
        asyncio.run(source.finish(1.0))
    transport.publish(len(parts))


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    transport = DiskTransport(SGLangAPI(), tmp_path / "weights")
    write(transport, "0011aabb:3")
    assert transport.checkpoint == tmp_path / "weights" / "weights-0011aabb-3"
    index = json.loads((transport.checkpoint / INDEX).read_text())
    assert index["weight_map"].keys() == {"a", "b", "c", "d"}
    assert index["metadata"]["total_size"] == 60 + 120 + 32 + 4
    # a; b alone, being larger than a bucket; c and d.
    assert len(set(index["weight_map"].values())) == 3
    for name, wanted in STREAM:
        with safe_open(transport.checkpoint / index["weight_map"][name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), wanted)
            assert file.metadata() == {"format": "pt"}


def test_the_config_of_quantised_weights_names_their_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "quantization_config": {"quant_method": "other"}}'
    )
    for given, wanted in ((None, "other"), ({"quant_method": "fp8"}, "fp8")):
        transport = DiskTransport(
            SGLangAPI(), tmp_path / "weights", source=tmp_path, quantization=given
        )
        write(transport, "0a:1")
        written = json.loads((transport.checkpoint / "config.json").read_text())
        assert written == {"model_type": "qwen3", "quantization_config": {"quant_method": wanted}}


def test_only_the_newest_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("not copied")
    transport = DiskTransport(SGLangAPI(), tmp_path / "weights", source=tmp_path)
    write(transport, "0a:1")
    transport.prepare("0a:2")
    transport.store(next(buckets(STREAM, 64)))  # breaks off here
    assert (tmp_path / "weights" / "weights-0a-1").is_dir()
    write(transport, "0a:3")
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["weights-0a-3"]
    assert (transport.checkpoint / "config.json").read_text() == "{}"
    assert not (transport.checkpoint / "model.safetensors").exists()
    write(transport, "0a:3")  # again, for a server that missed it
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["weights-0a-3"]


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file in its place")
    with pytest.raises(DiskError, match=str(tmp_path / "weights")):
        DiskTransport(SGLangAPI(), tmp_path / "weights").prepare("0a:1")


def test_sources_write_parts_of_one_checkpoint(tmp_path: Path) -> None:
    transport = DiskTransport(SGLangAPI(), tmp_path / "weights")
    write(transport, "0a:1", [STREAM[:2], [], STREAM[2:]])
    index = json.loads((transport.checkpoint / INDEX).read_text())
    assert index["weight_map"].keys() == {"a", "b", "c", "d"}
    assert index["metadata"]["total_size"] == 60 + 120 + 32 + 4
    assert sorted(file.name for file in transport.checkpoint.iterdir()) == [
        "model-00000-00001.safetensors",
        "model-00000-00002.safetensors",
        "model-00002-00001.safetensors",
        INDEX,
    ]
    for name, wanted in STREAM:
        with safe_open(transport.checkpoint / index["weight_map"][name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), wanted)


def test_a_source_that_wrote_elsewhere_is_an_error(tmp_path: Path) -> None:
    transport = DiskTransport(SGLangAPI(), tmp_path / "weights")
    transport.prepare("0a:1")
    transport.begin("0a:1", 1)
    asyncio.run(transport.finish(1.0))
    with pytest.raises(
        DiskError, match="part-00000.json: not there.*set sglang.weight_dir to one that all"
    ):
        transport.publish(2)
    assert transport.checkpoint is None


def test_what_people_keep_beside_the_weights_stays(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    theirs = (
        "weights-best",
        "weights-0a-1 (copy)",
        "weights-old",
        ".unfinished-work",
        "lost+found",
    )
    for name in theirs:
        (folder / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (folder / "weights-0b-7").symlink_to(tmp_path / "elsewhere")  # would end every update
    (folder / "weights-0a-2").symlink_to(tmp_path / "elsewhere")  # where a checkpoint goes
    (folder / ".unfinished-0b-7").mkdir()
    transport = DiskTransport(SGLangAPI(), folder)
    for version in ("0a:1", "0a:2"):
        write(transport, version)
    names = (*theirs, "weights-0a-2", "weights-0a-2.kept", "weights-0b-7")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert (folder / "weights-0a-2" / INDEX).is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []
