"""Layouts against a naive enumeration, and the command line with its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import InputError
from megatron_gspo.models import read_config
from megatron_gspo.tools.plan.__main__ import main
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import GPUS, find_gpu
from megatron_gspo.tools.plan.layout_search import Fixed, search
from megatron_gspo.tools.plan.layouts import feasible, name_of, parse_layout
from megatron_gspo.tools.plan.workload import Cluster, Workload
from tests.support.model_shapes import LARGE, SMALL, shape_of

BASE = ["--model", str(SMALL), "--gpus", "8", "--gpu", "h200", "--response-length", "8192"]


def naive_layouts(hf: dict[str, Any], gpus: int, batch: int) -> set[tuple[int, ...]]:
    """Every combination of sizes, by the rules as docs/scaling.md states them."""
    found = set()
    sizes = range(1, gpus + 1)
    for tp in sizes:
        for pp in sizes:
            for cp in sizes:
                if gpus % (tp * pp * cp) or gpus // (tp * pp * cp) > batch:
                    continue
                if hf["num_attention_heads"] % tp or hf["num_key_value_heads"] % tp:
                    continue
                extra = 2 if hf["num_hidden_layers"] % pp else 0
                if (hf["num_hidden_layers"] + extra) % pp:
                    continue
                for ep in sizes:
                    for etp in {1, tp}:
                        if gpus % (etp * ep * pp) or hf["num_experts"] % ep or hf["moe_intermediate_size"] % etp:
                            continue
                        layers = (hf["num_hidden_layers"] + extra) // pp
                        for vp in [1, *(v for v in (2, 3, 4) if pp > 1 and layers % v == 0)]:
                            found.add((tp, pp, extra, vp, cp, ep, etp))
    return found


@pytest.mark.parametrize("model, gpus, batch", [(SMALL, 8, 256), (SMALL, 16, 4), (LARGE, 16, 256)])
def test_layouts_are_all_that_the_rules_allow(model: Path, gpus: int, batch: int) -> None:
    hf = read_config(model)
    layouts, _ = feasible(hf, gpus, 8, batch)
    ours = [
        (
            p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.extra_pipeline_layers,
            p.virtual_pipeline_model_parallel_size or 1, p.context_parallel_size, p.expert_model_parallel_size,
            p.expert_tensor_size,
        )
        for p in layouts
    ]  # fmt: skip
    assert len(ours) == len(set(ours)) and set(ours) == naive_layouts(hf, gpus, batch)


def test_94_layers_have_few_stages_of_their_own() -> None:
    layouts, _ = feasible(read_config(LARGE), 128, 8, 4096)
    stages = {(p.pipeline_model_parallel_size, p.extra_pipeline_layers) for p in layouts}
    assert stages == {(1, 0), (2, 0), (4, 2), (8, 2), (16, 2), (32, 2)}
    assert {p.tensor_model_parallel_size for p in layouts} == {1, 2, 4}  # 4 key-value heads


def test_names() -> None:
    assert name_of(ParallelConfig()) == "DP only"
    assert name_of(ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=8)) == "TP2 EP8"


def test_a_named_layout() -> None:
    hf = read_config(SMALL)
    parallel = parse_layout("tp2 PP4,VP3 EP8", hf, 64)
    assert name_of(parallel) == "TP2 PP4 VP3 EP8"
    assert name_of(parse_layout("PP8+2 VP2", read_config(LARGE), 8)) == "PP8+2 VP2"
    with pytest.raises(InputError, match=r"EP8\+2 is no size"):
        parse_layout("EP8+2", hf, 8)
    fixed = Fixed(parallel, "full", 20_000)
    work, cluster = Workload(4096, global_batch_size=1024), Cluster(find_gpu("h100"), 64, "none")
    found = search(hf, shape_of(SMALL), work, cluster, Assumptions(), fixed)
    assert [(p.parallel, p.recompute, p.budget) for p in found.plans] == [(parallel, "full", 20_000)]


def test_what_fits_is_ranked_and_within_memory() -> None:
    cluster = Cluster(find_gpu("h200"), 8, "none")
    found = search(read_config(SMALL), shape_of(SMALL), Workload(4096), cluster, Assumptions())
    times = [plan.time.total for plan in found.plans]
    assert times == sorted(times) and len(found.plans) > 10
    room = 0.95 * cluster.gpu.memory
    assert all(plan.memory.total <= room for plan in found.plans)
    for plan in found.plans:  # a mode that recomputes less would be taken if it fitted at this budget
        order = ("none", "selective", "full")
        for mode in order[: order.index(plan.recompute)]:
            over = plan.memory.total - plan.memory.activations + plan.activations[mode]
            assert over > room, (name_of(plan.parallel), mode)
    small = Cluster(find_gpu("h100"), 8, "none")
    worse = search(read_config(SMALL), shape_of(SMALL), Workload(4096), small, Assumptions())
    assert len(worse.plans) < len(found.plans)
    filled = search(read_config(SMALL), shape_of(SMALL), Workload(4096), cluster, Assumptions(reserve=0.0))
    assert len(filled.plans) >= len(found.plans) and max(plan.memory.total for plan in filled.plans) > room


def test_the_page_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--colocated", "--engine-tensor", "2", "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "30.5 billion parameters" in text and "| optimizer " in text and "matmul_efficiency" in text
    assert main([*BASE, "--colocated", "--engine-tensor", "2", "--json", "--top", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    plan = record["plans"][0]
    parts = plan["memory_bytes"]
    total = sum(value for key, value in parts.items() if key not in ("stage", "head", "total"))
    assert parts["total"] == pytest.approx(total)
    assert set(plan["activations_bytes"]) == {"none", "selective", "full"}
    seconds = plan["seconds"]
    assert seconds["total"] == pytest.approx(sum(value for key, value in seconds.items() if key != "total"))
    assert f"tensor_model_parallel_size: {plan['parallel']['tensor_model_parallel_size']}" in text


def test_scale_is_one_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_gspo.tools.plan.__main__.SCALE", (8, 32))
    assert main(["--model", str(SMALL / "config.json"), "--gpu", "h100", "--response-length", "4096", "--scale"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["GPUs", "8", "32"]
    assert "100 %" in rows[1]


def test_the_command() -> None:
    command = [sys.executable, "-m", "megatron_gspo.tools.plan", *BASE, "--gpu", "h300"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and answer.stdout == ""
    assert answer.stderr.startswith("error: --gpu h300: ") and answer.stderr.count("\n") == 1


BAD = {
    "--gpu h300": (["--gpu", "h300"], "perhaps h200"),
    "--gpus 12": (["--gpus", "12"], "a multiple"),
    "--gpus 0": (["--gpus", "0"], "give 1 to 8"),
    "--gpus 4": (["--gpus", "4", "--gpu", "h100"], "lacks"),
    "--response-length 60000": (["--response-length", "60000"], "40960 positions"),
    "--response-length 0": (["--response-length", "0"], "at least 1"),
    "--response-length x": (["--response-length", "x"], "invalid int"),
    "--global-batch-size 100": (["--global-batch-size", "100"], "give a divisor"),
    "--engine-tensor 3": (["--engine-tensor", "3"], "give a divisor"),
    "--assume speed=2": (["--assume", "speed=2"], "is no assumption"),
    "--assume matmul_efficiency=x": (["--assume", "matmul_efficiency=x"], "no number"),
    "--assume matmul_efficiency=0": (["--assume", "matmul_efficiency=0"], "above 0"),
    "--assume matmul_efficiency=65": (["--assume", "matmul_efficiency=65"], "at most 1, as matmul_efficiency=0.65"),
    "--engine-gpus -8": (["--engine-gpus", "-8"], "give 1 or more"),
    "--layout TP2": (["--layout", "TP2", "--scale"], "leave one of them out"),
    "--assume other_seconds=-1": (["--assume", "other_seconds=-1"], "0 or more"),
    "--layout TP8": (["--layout", "TP8"], "set one of 1, 2, 4"),
    "--layout XX2": (["--layout", "XX2"], "is no size"),
    "--max-tokens 100": (["--max-tokens", "100"], "give at least 9216"),
    "--model nowhere": (["--model", "nowhere"], "give a Hugging Face model directory"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, fix = BAD[name]
    assert main([*BASE, *changes]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert name.split()[0] in captured.err and name.split()[1] in captured.err and fix in captured.err


@pytest.mark.parametrize(
    "content, what",
    [
        ("{}", "model_type=None"),
        ("[1]", "not valid JSON"),
        ("x", "not valid JSON"),
        ('{"model_type": "qwen3"}', "lacks the key"),
    ],
)
def test_a_config_that_is_no_model(content: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main([*BASE, "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_every_gpu_has_sane_figures() -> None:
    for gpu in GPUS.values():
        assert 2**35 < gpu.memory < 2**38 and 1e14 < gpu.flops < 1e16
        assert 1e12 < gpu.hbm < 1e13 and 1e11 < gpu.nvlink < gpu.hbm and 1e10 < gpu.network < gpu.nvlink
    assert find_gpu("H100-SXM") is find_gpu("h100")
