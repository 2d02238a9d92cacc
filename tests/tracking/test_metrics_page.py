"""docs/metrics.md lists what a run writes: every name that the code produces, and no other."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from megatron_gspo.algorithms import (
    PRESETS,
    finish_metrics,
    mismatch_metrics,
    ratio_quantiles,
    value_loss,
)
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.loop.generation import DataCursor
from megatron_gspo.loop.metrics_logging import ratio_arrays
from megatron_gspo.loop.optimizer_steps import Update
from megatron_gspo.loop.rollout_log import rollout_record
from megatron_gspo.loop.timers import _PHASES
from megatron_gspo.routing_replay.step_metrics import StepRouting
from tests.algorithms.reference import call_policy_loss, complete_preset

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
PACKAGE = ROOT / "megatron_gspo"
# rollout_cache: the head of a file; run_lines: what the terminal shows
KEEPS_OTHER_RECORDS = {"rollout_cache", "run_lines"}
SOURCES = (
    *(
        file
        for file in sorted((PACKAGE / "loop").glob("*.py"))
        if file.stem not in KEEPS_OTHER_RECORDS
    ),
    *(PACKAGE / "mcore" / f"{name}.py" for name in ("train_step", "forward_step")),
    PACKAGE / "rollout" / "server_engine" / "rollout_client.py",
    PACKAGE / "routing_replay" / "step_metrics.py",
)
# what a forward step returns; keys of summary.json; of a request; dtypes
NOT_METRICS = {
    "metrics",
    "log_probs",
    "exit",
    "exported",
    "callbacks",
    "guard",
    "low_steps",
    "tags",
    "float32",
    "bfloat16",
}
# functions that make a line of routing.jsonl or of rollouts.jsonl, and the arrays of ratios/
OTHER_RECORDS = {"by_layer", "rollout_record", "ratio_arrays"}


def documented(heading: str) -> set[str]:
    """Names in backticks in the first column of the tables under a heading of level 2."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [body] = [section_text for section_text in section if section_text.startswith(heading + "\n")]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def pattern(node: ast.expr) -> str | None:
    """A text constant as it is, an f-string with * for what it fills in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values)
    return None


def written_names(source: str) -> set[str]:
    """Keys of dict displays and comprehensions, and of assignments to an item (not `+=`), as
    patterns.
    """
    keys: list[ast.expr | None] = []
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    elsewhere = [
        node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in OTHER_RECORDS
    ]
    left_out = {id(inner) for function in elsewhere for inner in ast.walk(function)}
    nodes = [node for node in nodes if id(node) not in left_out]
    counted = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    for node in nodes:
        if id(node) in counted:
            continue
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.DictComp):
            keys.append(node.key)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    return {name for key in keys if key is not None and (name := pattern(key)) is not None}


def timer_names(source: str) -> set[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "timers" and c.args]
    return {f"time/{pattern(call.args[0])}" for call in named}


def computed_names() -> set[str]:
    """What the functions of the algorithms return, for every preset and option that adds a
    figure.
    """
    zeros = torch.zeros(4)
    mask = torch.ones(4)
    ids = torch.tensor([0, 0, 1, 1])
    names: set[str] = set()
    for name in PRESETS:
        centred = {} if name == "sft" else {"centering": zeros, "centering_advantages": mask}
        options = {"kl_loss_coef": 0.1, "entropy_coef": 0.1}
        options |= (
            {} if name == "sft" else {"log_ratio_coef": 0.1, "off_policy_mask_threshold": 0.1}
        )
        options |= {"dual_clip": 3.0} if name == "grpo" else {}
        _, metrics = call_policy_loss(
            complete_preset(name, **options),
            log_probs=torch.zeros(4, requires_grad=True),
            old_log_probs=zeros,
            advantages=mask,
            loss_mask=mask,
            segment_ids=ids,
            num_sequences=2,
            num_tokens=4,
            ref_log_probs=zeros,
            entropy=mask,
            divergence=zeros,
            **centred,
        )
        names |= set(finish_metrics(metrics))
    mismatch = mismatch_metrics(zeros, zeros, mask, num_tokens=4)
    names |= set(
        value_loss(zeros, old_values=zeros, returns=zeros, loss_mask=mask, num_tokens=4)[1]
    )
    return names | set(ratio_quantiles(zeros, zeros, mask, ids)) | set(mismatch)


def produced() -> set[str]:
    sources = [file.read_text(encoding="utf-8") for file in SOURCES]
    written = set().union(*map(written_names, sources)) - NOT_METRICS - set(_PHASES)
    timed = set().union(*map(timer_names, sources))
    critic = {f"critic/{name}" for name in ("grad_norm", "lr")}  # of its optimizer step
    return (
        {"step"}
        | critic
        | written
        | timed
        | {f"time/{part}" for part in _PHASES.values()}
        | computed_names()
    )


def unmatched(names: set[str], patterns: set[str]) -> set[str]:
    return {name for name in names if not any(fnmatchcase(name, p) for p in patterns)}


def test_the_sources_are_read() -> None:
    some = {
        "grad_norm",
        "loss",
        "reward/mean",
        "eval/pass@*",
        "verifier/*",
        "time/weight_sync",
        "ratio/std",
    }
    assert some <= produced()


def test_every_metric_is_documented() -> None:
    names = documented("metrics.jsonl")
    exact = {name for name in produced() if "*" not in name}
    assert exact - names == set()
    for wildcard in produced() - exact:
        assert any(fnmatchcase(name, wildcard) for name in names), f"no row for {wildcard}"


def test_every_row_is_produced() -> None:
    # time/* is what Timers.take makes of any phase: a phase must be one that the loop times
    wide = produced() - {"time/*"}
    assert unmatched(documented("metrics.jsonl"), wide) == set()


def test_summary_is_documented() -> None:
    tree = ast.parse((PACKAGE / "loop" / "checkpoints.py").read_text(encoding="utf-8"))
    [state] = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LoopState"
    ]
    fields = {item.target.id for item in state.body if isinstance(item, ast.AnnAssign)}
    assert documented("summary.json") == fields | {"exported", "exit"}


def test_other_records_are_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    [lines] = [
        line for line in page.splitlines() if "`routing.jsonl`" in line and line.startswith("|")
    ]
    [arrays] = [line for line in page.splitlines() if line.startswith("| `ratios/")]
    [rollouts] = [line for line in page.splitlines() if line.startswith("| `rollouts.jsonl`")]
    record = rollout_record(TrainingBatch.of([]).table, DataCursor())
    assert {key for key in record if f"`{key}`" not in rollouts} == set()
    assert {key for key in StepRouting().by_layer() if f"`{key}`" not in lines} == set()
    tokenizer = SimpleNamespace(decode=str)
    sample = Sample(
        prompt_index=0,
        sample_index=0,
        tokens=np.arange(4),
        prompt_length=2,
        loss_mask=np.array([True, False]),
        rollout_log_probs=None,
        finish_reason="stop",
        advantages=np.ones(2),
        old_log_probs=np.ones(2),
    )
    ratios = ratio_arrays(Update({}, TrainingBatch.of([sample]), np.zeros(2)), tokenizer)
    assert {key for key in ratios if f"`{key}`" not in arrays} == set()
    assert {key: value.tolist() for key, value in ratios.items()} == {
        "log_ratio": [-1.0],
        "sequence": [0],
        "advantage": [1.0],
        "token_ids": [2],
        "token_text": ["[2]"],
    }
