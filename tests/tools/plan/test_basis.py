"""Every figure of a plan is marked as rehearsed or estimated."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_gspo.tools.plan.__main__ import main
from megatron_gspo.tools.plan.basis import ESTIMATED, REHEARSED, basis_of
from megatron_gspo.tools.plan.workload import Workload
from tests.support.model_shapes import FOLDER, MINIMAX_M2, NEXT, SMALL, dense_shape, shape_of

TORCH = Workload(8192, implementation="torch")
OPTIONS = ["--model", str(SMALL), "--gpus", "32", "--gpu", "h200", "--response-length", "8192", "--layout",
           "TP2 PP2 CP2 EP4 ETP2", "--colocated", "--engine-tensor", "8", "--implementation"]  # fmt: skip


def tables(text: str) -> list[dict[str, str]]:
    """First and last cell of each row of the tables that have a column for the basis."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    found = [[[cell.strip() for cell in line.strip("|").split("|")] for line in block] for block in blocks]
    return [{row[0]: row[-1] for row in rows[2:]} for rows in found if rows[0][-1] == "basis"]


@pytest.mark.parametrize("implementation", ["torch", "transformer_engine"])
def test_every_printed_figure_has_a_basis(implementation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, implementation]) == 0
    text = capsys.readouterr().out
    memory, collectives, seconds, host = tables(text)
    layers = REHEARSED if implementation == "torch" else ESTIMATED
    states = dict.fromkeys(("weights", "gradients", "optimizer", "reference policy"), REHEARSED)
    activations = dict.fromkeys(("activations (peak)", "of these log-prob head"), layers)
    rest = dict.fromkeys(("routing replay", "engine", "runtime", "value model", "total"), ESTIMATED)
    assert memory == states | activations | rest
    assert collectives.pop("context") == layers
    assert set(collectives) >= {"tensor", "expert", "expert tensor", "pipeline", "gradients", "weights"}
    assert set(collectives.values()) == {REHEARSED}
    assert set(seconds) > {"products", "generation", "total"} and set(seconds.values()) == {ESTIMATED}
    assert len(host) == 7 and set(host.values()) == {ESTIMATED}
    assert "fastest, all figures estimated:" in text and "Limited by, estimated:" in text
    assert f"Activations by recompute mode, GiB, {layers}:" in text


@pytest.mark.parametrize("implementation", ["torch", "transformer_engine"])
def test_every_figure_of_the_json_has_a_basis(implementation: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*OPTIONS, implementation, "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["plans"]
    basis = plan["basis"]
    assert set(basis["memory_bytes"]) == set(plan["memory_bytes"]) - {"stage"}
    for name in ("activations_bytes", "seconds"):
        assert set(basis[name]) == set(plan[name]), name
    assert set(basis["collective_bytes"]) >= set(plan["collective_bytes"]) > {"tensor", "context", "expert", "pipeline"}
    choices = {"name", "parallel", "data_parallel_size", "recompute", "max_tokens_per_micro_batch", "micro_batches"}
    assert set(plan) == set(basis) | choices | {"basis"}
    assert set(basis["host"]) == set(plan["host"])
    assert basis["memory_bytes"]["optimizer"] == basis["collective_bytes"]["tensor"] == REHEARSED
    assert set(basis["seconds"].values()) == {ESTIMATED}


def test_only_layers_that_were_rehearsed_are() -> None:
    shape = shape_of(SMALL)
    assert basis_of(shape, TORCH)["memory_bytes"]["activations"] == REHEARSED
    assert basis_of(shape, TORCH)["collective_bytes"]["context"] == REHEARSED
    others = ("glm4_moe/models/GLM-4.5-Air", "gpt_oss/models/gpt-oss-20b", "qwen3_5_moe/models/Qwen3.5-35B-A3B")
    for path in (NEXT, MINIMAX_M2, *(FOLDER / name for name in others)):
        assert basis_of(shape_of(path), TORCH)["memory_bytes"]["activations"] == REHEARSED, path
    latent = basis_of(shape_of(FOLDER / "deepseek_v3" / "models" / "Moonlight-16B-A3B"), TORCH)
    assert latent["memory_bytes"]["activations"] == ESTIMATED and latent["collective_bytes"]["tensor"] == REHEARSED
    engine = basis_of(shape, Workload(8192))
    assert engine["activations_bytes"]["full"] == engine["collective_bytes"]["context"] == ESTIMATED
    assert engine["memory_bytes"]["weights"] == engine["collective_bytes"]["expert"] == REHEARSED
    for other, work in ((dense_shape(), TORCH), (shape, dataclasses.replace(TORCH, dtype_bytes=4)),
                        (dataclasses.replace(shape, mixers=("windowed_attention",) * 48), TORCH)):  # fmt: skip
        found = basis_of(other, work)["memory_bytes"]
        assert found["activations"] == ESTIMATED and found["optimizer"] == REHEARSED
