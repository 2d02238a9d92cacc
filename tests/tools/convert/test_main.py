"""Conversions both ways: byte-equal files, Megatron's own loader, resume after a kill, and what
is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file

from megatron_gspo.config import ParallelConfig
from megatron_gspo.mcore.checkpoint.metadata_file import METADATA, read_metadata
from megatron_gspo.mcore.hf_weights import export_weights
from megatron_gspo.mcore.meta_device import smallest_world
from megatron_gspo.mcore.model import build_model
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.hf_checkpoint import INDEX, SINGLE, CheckpointReader, write_checkpoint
from megatron_gspo.models.model_shape import read_json
from megatron_gspo.tools.convert import __main__ as convert
from megatron_gspo.tools.convert.commands import chunks_of
from megatron_gspo.tools.convert.to_hugging_face import to_hugging_face
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader
from megatron_gspo.tools.convert.work_units import Workers
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.configs import adam, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

ONE = ["--processes", "1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """95 tokens: an odd vocabulary, which two tensor-parallel ranks pad."""
    folder = tmp_path_factory.mktemp("models")
    kept = {
        "moe": save_tiny_model(folder / "moe", vocab_size=95, dtype=torch.bfloat16),
        "mixed": save_tiny_model(folder / "mixed", mlp_only_layers=[1]),
        "shared": save_tiny_model(folder / "shared", "shared"),
        "tied": save_tiny_model(folder / "tied", "dense", vocab_size=95, tie_word_embeddings=True),
    }
    sharded = folder / "sharded"
    write_checkpoint(
        sharded,
        load_file(Path(kept["moe"]) / SINGLE).items(),
        source=kept["moe"],
        max_shard_bytes=50_000,
    )
    (sharded / "tokenizer.json").write_text("{}")
    return {name: Path(path) for name, path in kept.items()} | {"sharded": sharded}


def run(*arguments: Any) -> None:
    convert.main([str(argument) for argument in arguments] + ONE)


def fails(capsys, *arguments: Any) -> str:
    """The one line that a conversion ends with."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code in (1, 2) and line.startswith("error: ")
    return line


def same_files(a: Path, b: Path) -> bool:
    names = {file.name for file in a.glob("*.safetensors")}
    return bool(names) and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


CASES = [
    ("moe", [], parallel(tensor=2, expert=2)),
    ("moe", ["--tp", 2, "--ep", 4, "--pp", 2], parallel(pipeline=2, expert_tensor=2)),
    ("mixed", ["--pp", 4, "--ep", 2], parallel(pipeline=2, virtual_pipeline=2)),
    ("shared", ["--tp", 2, "--ep", 2], parallel(expert=2)),
    ("tied", ["--tp", 2, "--pp", 2], parallel(tensor=2)),
]


@pytest.mark.parametrize(("name", "flags", "other"), CASES)
def test_there_and_back_is_the_same_to_the_byte_and_megatron_loads_it(
    models, name, flags, other, tmp_path
):
    source = models[name]
    run("to-megatron", source, tmp_path / "megatron", *flags, "--verify")
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert same_files(source, tmp_path / "back")
    assert read_json(tmp_path / "back" / "config.json") == read_json(Path(source) / "config.json")
    loaded = run_distributed(
        load_in_megatron, smallest_world(other), str(source), str(tmp_path / "megatron"), other
    )
    expected = load_file(source / SINGLE)
    wanted = {key for _, keys in loaded for key in keys}
    metadata = read_metadata(tmp_path / "megatron" / METADATA).state_dict_metadata
    assert metadata.keys() == wanted, "as many keys as the model asks for, objects too"
    for weights, _ in loaded:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], expected[key]) for key in expected)


def load_in_megatron(
    rank: int, world_size: int, source: str, checkpoint: str, layout: ParallelConfig
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights by Megatron's own `dist_checkpointing.load` in another layout, and the keys that
    it read.

    Not with strict="raise_all", which megatron-core 0.19.2 can't do on torch 2.15
    (patches/README.md).
    """
    family, shape = family_of(read_config(source))
    groups = groups_of(layout)
    dtype = DistributedReader(checkpoint).dtype("decoder.final_layernorm.weight")
    chunks = build_model(
        shape, layout, model_config(dtype=str(dtype).removeprefix("torch.")), groups
    )
    content = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    asked = [value for values in content.values() for value in values.values()]
    keys = [value.unique_key if isinstance(value, ShardedObject) else value.key for value in asked]
    loaded = dist_checkpointing.load(content, checkpoint)
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"])
    return {
        name: tensor.clone() for name, tensor in export_weights(chunks, family, shape, groups)
    }, keys


def test_shards_index_tokenizer_and_type_are_the_sources(models, tmp_path):
    source = models["sharded"]
    run("to-megatron", source, tmp_path / "megatron", "--ep", 2)
    run("to-hf", tmp_path / "megatron", tmp_path / "back")
    assert len(list(source.glob("*.safetensors"))) > 2 and same_files(source, tmp_path / "back")
    indices = [json.loads((path / INDEX).read_text()) for path in (source, tmp_path / "back")]
    assert indices[0] == indices[1]
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"
    run("to-hf", tmp_path / "megatron", tmp_path / "wide", "--dtype", "float32", "--verify")
    with CheckpointReader(tmp_path / "wide") as reader:
        assert reader.common_dtype() is torch.float32
    config = read_config(tmp_path / "wide")
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_several_processes_write_the_same(models, tmp_path):
    several = ["--processes", "2", "--unit-mib", "0.02"]
    convert.main(
        ["to-megatron", str(models["moe"]), str(tmp_path / "megatron"), "--verify", *several]
    )
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 5
    convert.main(["to-hf", str(tmp_path / "megatron"), str(tmp_path / "back"), *several])
    assert same_files(models["moe"], tmp_path / "back")
    sums = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "megatron", check=False
    )
    assert sums.returncode == 0


def test_large_tensors_are_written_in_pieces(models, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_gspo.tools.convert.to_megatron._PIECE_BYTES", 1000)
    run("to-megatron", models["mixed"], tmp_path / "megatron", "--tp", 2, "--verify")
    [embedding] = [
        value
        for key, value in read_metadata(
            tmp_path / "megatron" / METADATA
        ).state_dict_metadata.items()
        if key == "embedding.word_embeddings.weight"
    ]
    assert (
        max(chunk.sizes.numel() for chunk in embedding.chunks) * 4 <= 1000
        and len(embedding.chunks) > 4
    )
    run("to-hf", tmp_path / "megatron", tmp_path / "back")
    assert same_files(models["mixed"], tmp_path / "back")


def unit_by_unit(tmp_path: Path, command: list[str]) -> subprocess.Popen:
    """A conversion in a process of its own, which waits after each unit until it is killed."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "from megatron_gspo.tools.convert import work_directory\n"
        "from megatron_gspo.tools.convert import __main__ as convert\n"
        "record = work_directory.Workspace.record\n"
        "def slow(self, unit, result):\n"
        "    record(self, unit, result)\n"
        "    if len(self.done) == 3:\n"
        "        print('three', flush=True)\n"
        "        time.sleep(600)\n"
        "work_directory.Workspace.record = slow\n"
        "convert.main(sys.argv[1:])\n"
    )
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, str(script), *command], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("way", ["to-megatron", "to-hf"])
def test_a_killed_conversion_goes_on_and_never_looks_finished(models, way, tmp_path, capsys):
    small = ["--unit-mib", "0.02"]
    source = models["sharded"]
    if way == "to-hf":
        run("to-megatron", models["sharded"], tmp_path / "from")
        source = tmp_path / "from"
    command = [way, str(source), str(tmp_path / "out"), *small]
    process = unit_by_unit(tmp_path, [*command, *ONE])
    assert process.stdout is not None and process.stdout.readline() == "three\n"
    assert "in use by another conversion" in fails(capsys, *command)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert "holds another conversion" in fails(capsys, *command, "--dtype", "float32")
    kept = {
        file: file.stat().st_mtime_ns for file in (tmp_path / "out.partial" / "result").rglob("*")
    }
    journal = (tmp_path / "out.partial" / "journal.jsonl").read_text()
    # What a power failure leaves.
    (tmp_path / "out.partial" / "journal.jsonl").write_text(journal + '[3, [["half')
    time.sleep(0.01)
    run(*command, "--verify")
    assert not (tmp_path / "out.partial").exists()
    if way == "to-megatron":
        unchanged = [
            f for f, t in kept.items() if (tmp_path / "out" / f.name).stat().st_mtime_ns == t
        ]
        assert len(unchanged) == 3
    else:
        assert same_files(models["sharded"], tmp_path / "out")


def test_a_file_without_its_header_is_written_again(models, tmp_path):
    """Killed, or without power, between the file's full size and its header; units of it count
    as done by then.
    """
    source = tmp_path / "from"
    back = tmp_path / "back"
    run("to-megatron", models["sharded"], source)

    def broken_off(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    def convert_back(report: Callable[[int, int], None]) -> None:
        workers = Workers(unit_bytes=20_000, report=report)
        to_hugging_face(source, back, chunks_of(source / "hf"), source / "hf", workers=workers)

    with pytest.raises(KeyboardInterrupt):
        convert_back(broken_off)
    for file in (tmp_path / "back.partial" / "result").glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.write(bytes(100))
    convert_back(lambda done, total: None)
    assert same_files(models["sharded"], back)


def test_a_training_runs_checkpoint_in_one_command(models, tmp_path):
    """Model, optimizer and loop state as the loop saves them; only the weights go over."""
    source = models["mixed"]
    checkpoint = run_distributed(save_as_training_does, 4, str(source), str(tmp_path / "run"))[0]
    config = {"model": {"path": str(source)}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config))
    assert any(key.startswith("optimizer") for key in DistributedReader(checkpoint).tensors)
    run("to-hf", tmp_path / "run", tmp_path / "hf", "--verify")
    assert same_files(source, tmp_path / "hf")


def save_as_training_does(rank: int, world_size: int, source: str, folder: str) -> str:
    from megatron_gspo.mcore.checkpoint.save_load import save_checkpoint
    from megatron_gspo.mcore.policy import build_policy

    layout = parallel(tensor=2, pipeline=2, expert=2)
    policy = build_policy(model_config(source), layout, groups_of(layout), optimizer=adam(lr=1e-3))
    return str(save_checkpoint(policy, Path(folder) / "checkpoints", 3, {}, keep=2))


def test_megatrons_own_torch_layers_name_a_norm_otherwise(models, tmp_path):
    """`convert` reads the norm before the experts under both names."""
    run("to-megatron", models["moe"], tmp_path / "megatron")
    file = tmp_path / "megatron" / METADATA
    metadata = read_metadata(file)
    old = "layers.1.pre_mlp_layernorm.weight"
    new = "layers.1.mlp.linear_fc1.layer_norm_weight"
    metadata.state_dict_metadata = {
        k.replace(old, new): v for k, v in metadata.state_dict_metadata.items()
    }
    metadata.storage_data = {
        dataclasses.replace(k, fqn=k.fqn.replace(old, new)): v
        for k, v in metadata.storage_data.items()
    }
    file.write_bytes(pickle.dumps(metadata))
    run("to-hf", tmp_path / "megatron", tmp_path / "back", "--verify")
    assert same_files(models["moe"], tmp_path / "back")


def test_log_probs_of_a_text_agree(tmp_path, capsys):
    tokenizer = character_tokenizer()
    source = Path(save_tiny_model(tmp_path / "moe", vocab_size=len(tokenizer)))
    tokenizer.save_pretrained(source)
    run("to-megatron", source, tmp_path / "megatron", "--ep", 2)
    run("verify", source, tmp_path / "megatron", "--probe", "some words")
    difference = float(
        re.search(r"log-probs of \d+ tokens differ by at most (\S+)", capsys.readouterr().err)[1]
    )
    assert difference < 2e-5
    assert "at least two" in fails(capsys, "verify", source, tmp_path / "megatron", "--probe", "")
