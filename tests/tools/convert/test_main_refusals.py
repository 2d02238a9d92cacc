"""What a conversion refuses: one line before any work, nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gspo.models.hf_checkpoint import INDEX, write_checkpoint
from megatron_gspo.tools.convert import __main__ as convert
from megatron_gspo.tools.convert.torch_dcp_files import METADATA
from tests.support.tiny_models import save_tiny_model

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """The same model in several files, and as a Megatron checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    single_file = save_tiny_model(folder / "one", num_hidden_layers=2, num_experts=4)
    tensors = load_file(Path(single_file) / "model.safetensors")
    write_checkpoint(folder / "hf", tensors.items(), source=single_file, max_shard_bytes=40_000)
    convert.main(["to-megatron", str(folder / "hf"), str(folder / "megatron"), "--processes", "1"])
    return {"to-megatron": folder / "hf", "to-hf": folder / "megatron"}


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def changed(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes the tensors of the file that holds `QUERY`."""

    def apply(folder: Path) -> None:
        file = shard_of(folder, QUERY)
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


def renamed(folder: Path) -> None:
    new = QUERY.replace("q_proj", "query")
    changed(lambda tensors: tensors.update({new: tensors.pop(QUERY)}))(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][new] = index["weight_map"].pop(QUERY)
    (folder / INDEX).write_text(json.dumps(index))


def escaped(folder: Path) -> None:
    """The way back writes files of the index's names."""
    file = next(folder.rglob(INDEX))
    index = json.loads(file.read_text())
    index["weight_map"][QUERY] = "../mine.safetensors"
    file.write_text(json.dumps(index))


def edit_config(**keys: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = next(folder.rglob("config.json"))
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return apply


def truncated(pattern: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[0]
        os.truncate(file, file.stat().st_size // 2)

    return apply


CASES = [
    (
        "to-megatron",
        lambda f: shard_of(f, QUERY).unlink(),
        ["this shard is missing", "download it again"],
    ),
    ("to-megatron", truncated("model-00002*"), ["model-00002", "damaged or cut short"]),
    (
        "to-megatron",
        changed(lambda t: t.update({QUERY: t[QUERY].to(torch.int8)})),
        [QUERY, "I8", "quantised"],
    ),
    (
        "to-megatron",
        changed(lambda t: t.update({QUERY: t[QUERY].half()})),
        [QUERY, "F16", "F32", "--dtype"],
    ),
    (
        "to-megatron",
        changed(lambda t: t.update({QUERY: t[QUERY][:-1].clone()})),
        [QUERY, "(63, 32)", "(64, 32)"],
    ),
    ("to-megatron", changed(lambda t: t.pop(QUERY)), [QUERY, "lacks", INDEX]),
    ("to-megatron", renamed, [QUERY, "config.json and weights disagree"]),
    ("to-megatron", edit_config(num_experts=2, num_local_experts=2), ["does not use"]),
    ("to-megatron", escaped, [INDEX, QUERY, "'../mine.safetensors'", "download it again"]),
    ("to-hf", escaped, [INDEX, QUERY, "'../mine.safetensors'", "download it again"]),
    (
        "to-hf",
        lambda f: (f / "__0_0.distcp").unlink(),
        ["__0_0.distcp", "missing", "copy or save it again"],
    ),
    (
        "to-hf",
        truncated("*.distcp"),
        ["__0_0.distcp", "cut short", "bytes or more; copy or save it again"],
    ),
    ("to-hf", truncated(METADATA), [METADATA, "not readable"]),
    (
        "to-hf",
        lambda f: (f / METADATA).write_bytes(b"cposix\nsystem\n(S'true'\ntR."),
        ["posix.system", "no checkp"],
    ),
    ("to-hf", edit_config(num_hidden_layers=3), ["lacks decoder.layers.2", "config.json's model"]),
    ("to-hf", edit_config(hidden_size=48), ["config.json makes it"]),
    ("to-hf", lambda f: shutil.rmtree(f / "hf"), ["--source DIR"]),
]


@pytest.mark.parametrize(("way", "damage", "says"), CASES, ids=lambda value: None)
def test_a_source_that_cannot_be_converted_is_refused_before_any_work(
    way, damage, says, whole, tmp_path, capsys
):
    source = tmp_path / "source"
    shutil.copytree(whole[way], source)
    damage(source)
    line = refused(capsys, way, source, tmp_path / "out")
    assert all(word in line for word in says), line
    # No output, no partial one.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def refused(capsys, *arguments: Any) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        convert.main([*map(str, arguments), "--processes", "1"])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stopped.value.code in (1, 2) and len(lines) == 1 and "error: " in lines[0], lines
    return lines[0]


def test_a_damaged_file_of_tensors_is_named_and_nothing_looks_finished(whole, tmp_path, capsys):
    shutil.copytree(whole["to-hf"], tmp_path / "source")
    with (tmp_path / "source" / "__0_0.distcp").open("r+b") as file:
        file.write(bytes(file.seek(0, os.SEEK_END) - file.seek(0)))
    with pytest.raises(SystemExit):
        convert.main(["to-hf", str(tmp_path / "source"), str(tmp_path / "out"), "--processes", "1"])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "can't be read from __0_0.distcp" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["to-megatron", "to-hf"])
def test_an_output_that_exists_stays_as_it_is(way, whole, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert "exists; remove it or choose another" in refused(
        capsys, way, whole[way], tmp_path / "out"
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize("way", ["to-megatron", "to-hf"])
def test_a_full_disk_is_noticed_before_work(way, whole, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    line = refused(capsys, way, whole[way], tmp_path / "out")
    assert "needed, 1000 bytes free; free some space" in line
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_under_way_is_one_line(whole, tmp_path, capsys):
    """A limit on the size of files stands for a disk that fills up after it was looked at."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        line = refused(capsys, "to-megatron", whole["to-megatron"], tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "__0_0.distcp: cannot be written: file too large" in line and not list(
        tmp_path.iterdir()
    )
