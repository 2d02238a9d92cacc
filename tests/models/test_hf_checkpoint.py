"""Checkpoint files: slices and their errors, and atomic exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gspo.models import ModelError
from megatron_gspo.models.hf_checkpoint import (
    INDEX,
    SINGLE,
    CheckpointReader,
    copy_companions,
    write_checkpoint,
)
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = Path(
        save_tiny_model(
            tmp_path_factory.mktemp("models") / "moe", num_hidden_layers=2, num_experts=4
        )
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"):
        (path / name).write_text(name)
    (path / "training_args.bin").write_text("not part of the model")
    return path


@pytest.fixture(scope="module")
def tensors(source) -> dict[str, torch.Tensor]:
    return load_file(source / SINGLE)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(path) as reader:
        return {name: reader.read(name) for name in reader.names}


def test_reads_slices(source, tensors):
    name = "model.layers.1.self_attn.q_proj.weight"
    with CheckpointReader(source) as reader:
        assert reader.shape(name) == tuple(tensors[name].shape)
        assert torch.equal(reader.read(name, 0, 3, 7), tensors[name][3:7])
        assert torch.equal(reader.read(name, 1, 5), tensors[name][:, 5:])
        assert torch.equal(
            reader.read("model.norm.weight", 0, 1, 2), tensors["model.norm.weight"][1:2]
        )
        assert reader.read(name, 0, 4, 4).shape == (0, tensors[name].shape[1])


def test_missing_files_and_tensors_are_named(source, tensors, tmp_path):
    with pytest.raises(ModelError, match=f"neither {SINGLE} nor {INDEX}"):
        CheckpointReader(tmp_path)
    with (
        CheckpointReader(source) as reader,
        pytest.raises(ModelError, match="no tensor model.nothing"),
    ):
        reader.read("model.nothing")
    path = write_checkpoint(
        tmp_path / "sharded", tensors.items(), source=source, max_shard_bytes=20_000
    )
    shard = json.loads((path / INDEX).read_text())["weight_map"]["model.norm.weight"]
    (path / shard).unlink()
    with CheckpointReader(path) as reader:
        with pytest.raises(
            ModelError, match=f"{shard}: this shard is missing; it holds model.norm.weight"
        ):
            reader.read("model.norm.weight")


def test_writes_shards_with_an_index(source, tensors, tmp_path):
    limit = 20_000
    path = write_checkpoint(
        tmp_path / "export", iter(tensors.items()), source=source, max_shard_bytes=limit
    )
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted(set(index["weight_map"].values()))
    assert (
        files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        and len(files) > 2
    )
    for file in files:
        held = load_file(path / file)
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file}
        assert sum(tensor.nbytes for tensor in held.values()) <= limit or len(held) == 1
    assert same(read_all(path), tensors)
    assert not (path / SINGLE).exists() and not list(path.glob("shard-*"))


@pytest.mark.parametrize("limit", [1 << 30, 20_000], ids=["one file", "shards"])
def test_transformers_loads_an_export_bit_equal(source, tensors, tmp_path, limit):
    path = write_checkpoint(
        tmp_path / "export", tensors.items(), source=source, max_shard_bytes=limit
    )
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, path)]
    assert same(models[0].state_dict(), models[1].state_dict())
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


def test_writes_another_dtype_and_views_alone(source, tmp_path):
    """Slices of one buffer, as a broadcast gives them, are written by themselves and not with
    their storage.
    """
    flat = torch.randn(1000)
    stream = ((f"part{i}", flat[i * 10 : i * 10 + 10].view(2, 5)) for i in range(3))
    path = write_checkpoint(tmp_path / "export", stream, source=source, dtype=torch.bfloat16)
    written = load_file(path / SINGLE)
    assert all(
        torch.equal(written[f"part{i}"], flat[i * 10 : i * 10 + 10].view(2, 5).bfloat16())
        for i in range(3)
    )
    assert (path / SINGLE).stat().st_size < 2000
    assert AutoConfig.from_pretrained(source).dtype == torch.float32
    # What loads it would cast it back.
    assert AutoConfig.from_pretrained(path).dtype == torch.bfloat16


def test_a_broken_stream_leaves_the_old_export(source, tensors, tmp_path):
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(tensors.items()):
            if i == 10:
                raise RuntimeError("a rank died")
            yield name, tensor * 2

    path = tmp_path / "export"
    with pytest.raises(RuntimeError, match="a rank died"):
        write_checkpoint(path, broken(), source=source, max_shard_bytes=5_000)
    assert not path.exists()
    with pytest.raises(ModelError):  # leftovers are never taken for an export
        CheckpointReader(path.with_name("export.partial"))
    write_checkpoint(path, tensors.items(), source=source)
    with pytest.raises(RuntimeError, match="a rank died"):
        write_checkpoint(path, broken(), source=source, max_shard_bytes=5_000)
    assert same(read_all(path), tensors)
    doubled = {name: tensor * 2 for name, tensor in tensors.items()}
    write_checkpoint(path, doubled.items(), source=source)
    assert same(read_all(path), doubled)
    assert [file.name for file in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (
            dict(text_config=dict(dtype="float32", vocab_size=3)),
            dict(text_config=dict(dtype="bfloat16", vocab_size=3)),
        ),
        (dict(torch_dtype="float16", text_config={}), dict(torch_dtype="bfloat16", text_config={})),
        (
            dict(dtype="float16", text_config=dict(dtype="float32")),
            dict(dtype="bfloat16", text_config=dict(dtype="bfloat16")),
        ),
        (
            dict(vision_config=dict(dtype="float32")),
            dict(vision_config=dict(dtype="float32"), dtype="bfloat16"),
        ),
    ],
)
def test_a_language_model_that_is_a_part_has_the_type_in_its_own_config(given, written, tmp_path):
    """What loads it would cast it back; the vision tower is not written in another type."""
    (tmp_path / "config.json").write_text(json.dumps(given))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    copy_companions(tmp_path, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == written
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_where_a_checkpoint_goes_is_kept(tmp_path, capsys, target):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_text("mine")
    (tmp_path / "hf").symlink_to(tmp_path / target)
    (tmp_path / "hf.old").mkdir()  # as people call what they want to keep
    (tmp_path / ".replaced_hf_0123abcd").mkdir()
    for _ in range(2):
        write_checkpoint(tmp_path / "hf", [("a", torch.ones(2))], source=tmp_path)
    assert not (tmp_path / "hf").is_symlink() and (tmp_path / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "elsewhere" / "model.safetensors").read_text() == "mine"
    names = ["config.json", "elsewhere", "hf", "hf.kept", "hf.old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert capsys.readouterr().err.count("hf was there and is not this run's: it is now") == 1
