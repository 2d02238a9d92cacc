"""The checkpoints that servers read: whole under their name or not there, the newest kept, the rest cleared away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_gspo.errors import DiskError
from megatron_gspo.weight_transport.buckets import buckets
from megatron_gspo.weight_transport.disk_transport import INDEX, DiskRoute

STREAM = [("a", torch.randn(3, 5)), ("b", torch.randn(60).bfloat16()), ("c", torch.arange(4)), ("d", torch.randn(()))]


def write(route: DiskRoute, version: str) -> None:
    route.begin(version)
    for bucket in buckets(STREAM, 64):
        route.take(bucket)
    route.end()


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    route = DiskRoute(tmp_path / "weights")
    write(route, "0011aabb:3")
    assert route.checkpoint == tmp_path / "weights" / "weights-0011aabb-3"
    index = json.loads((route.checkpoint / INDEX).read_text())
    assert index["weight_map"].keys() == {"a", "b", "c", "d"}
    assert index["metadata"]["total_size"] == 60 + 120 + 32 + 4
    assert len(set(index["weight_map"].values())) == 3  # a; b alone, being larger than a bucket; c and d
    for name, wanted in STREAM:
        with safe_open(route.checkpoint / index["weight_map"][name], framework="pt") as file:
            assert torch.equal(file.get_tensor(name), wanted) and file.metadata() == {"format": "pt"}


def test_only_the_newest_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("not copied")
    route = DiskRoute(tmp_path / "weights", source=tmp_path)
    write(route, "x:1")
    route.begin("x:2")
    route.take(next(buckets(STREAM, 64)))  # breaks off here
    assert (tmp_path / "weights" / "weights-x-1").is_dir()
    write(route, "x:3")
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["weights-x-3"]
    assert (route.checkpoint / "config.json").read_text() == "{}"
    assert not (route.checkpoint / "model.safetensors").exists()
    write(route, "x:3")  # again, for a server that missed it
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["weights-x-3"]


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file in its place")
    with pytest.raises(DiskError, match=str(tmp_path / "weights")):
        DiskRoute(tmp_path / "weights").begin("x:1")
