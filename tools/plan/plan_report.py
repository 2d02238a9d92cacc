"""The text of a plan: Markdown tables, the limits of each layout, and the assumptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.adapters import total_adapters
from megatron_gspo.tools.plan.assumptions import Assumptions, reasons
from megatron_gspo.tools.plan.basis import ESTIMATED, EXPLAINED, basis_of
from megatron_gspo.tools.plan.hardware import GIB
from megatron_gspo.tools.plan.layout_search import Plan, Search, limits
from megatron_gspo.tools.plan.layouts import name_of
from megatron_gspo.tools.plan.parameters import active_parameters, total_parameters
from megatron_gspo.tools.plan.workload import OWN_GPUS, Cluster, Workload


def describe(shape: ModelShape, work: Workload, cluster: Cluster, *, sizes: bool = True) -> str:
    """Two lines: the model, and the workload with its hardware (``sizes=False``: without numbers of GPUs)."""
    gpu = cluster.gpu
    own = f"{cluster.engine_gpus} GPUs" if sizes else "GPUs"
    engine = {
        **dict.fromkeys(OWN_GPUS, f"engines on {own} of their own"),
        "colocated": "engines on the same GPUs", "embedded": "the embedded engine (not timed)",
        "none": "generation not counted",
    }[cluster.engine]  # fmt: skip
    return (
        f"{shape.model_type}, {total_parameters(shape) / 1e9:.1f} billion parameters, "
        f"{active_parameters(shape) / 1e9:.1f} active per token; "
        f"{work.implementation} layers, {'bfloat16' if work.dtype_bytes == 2 else 'float32'}{_adapters(shape, work)}\n"
        f"{work.rollout_batch_size} prompts x {work.n_samples} responses of up to {work.prompt_length} + "
        f"{work.response_length} tokens, mini-batches of {work.global_batch_size}; "
        f"{f'{cluster.gpus} x ' if sizes else ''}{gpu.name} "
        f"({gpu.memory / GIB:.1f} GiB), {engine}"
    )


def _adapters(shape: ModelShape, work: Workload) -> str:
    if work.lora is None:
        return ""
    return f"; adapters of rank {work.lora.rank}, {total_adapters(shape, work.lora) / 1e6:.1f} million parameters"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def ranking(plans: Sequence[Plan], cluster: Cluster) -> str:
    """One row per layout: memory of the fullest rank, and seconds of a rollout batch."""
    rows = [["layout", "DP", "recompute", "tokens", "micro-batches", "GiB", "step s", "training", "bubble", "use"]]
    for plan in plans:
        rows.append([
            name_of(plan.parallel), str(plan.data_parallel), plan.recompute, str(plan.budget), str(plan.micro_batches),
            f"{plan.memory.total / GIB:.1f}", f"{plan.time.total:.0f}", f"{plan.time.training:.0f}",
            f"{100 * plan.time.bubble / plan.time.training:.0f} %", f"{100 * plan.utilisation(cluster):.0f} %",
        ])  # fmt: skip
    return table(rows)


def memory_table(plan: Plan, basis: dict[str, Any]) -> str:
    """Memory of the fullest rank by content, in GiB."""
    held, rests_on = plan.memory.to_json(), basis["memory_bytes"]
    names = {"activations": "activations (peak)", "head": "of these log-prob head", "reference": "reference policy",
             "routes": "routing replay", "value_model": "value model"}  # fmt: skip
    rows = [["memory, GiB", f"stage {plan.memory.stage}", "basis"]]
    rows += [[names.get(name, name), f"{held[name] / GIB:.2f}", rests_on[name]] for name in rests_on]
    modes = ", ".join(f"{mode} {peak / GIB:.1f}" for mode, peak in plan.activations.items())
    return table(rows) + f"\n\nActivations by recompute mode, GiB, {rests_on['activations']}: {modes}."


def collectives_table(plan: Plan, basis: dict[str, Any]) -> str:
    """Bytes of a mini-batch, in GiB."""
    rests_on = basis["collective_bytes"]
    rows = [["collectives of a mini-batch, GiB", f"stage {plan.memory.stage}", "basis"]]
    return table(rows + [[name, f"{size / GIB:.2f}", rests_on[name]] for name, size in plan.collectives.items()])


def time_table(plan: Plan, basis: dict[str, Any]) -> str:
    """Seconds of a rollout batch by activity."""
    rows = [["seconds of a rollout batch", "", "share", "basis"]]
    for name, seconds in plan.time.to_json().items():
        if seconds:
            share = f"{100 * seconds / plan.time.total:.0f} %"
            rows.append([name, f"{seconds:.1f}", share, basis["seconds"][name]])
    return table(rows)


def host_table(plan: Plan, basis: dict[str, Any]) -> str:
    """What the host of a replica's first rank does in a step."""
    names = {
        "numbers": "held of all samples, MiB", "samples": "held of its replica's samples, GiB",
        "checkpoint": "buffers of a checkpoint, GiB", "answers": "received answers, GiB",
        "source": "weights sent by the largest source, GiB", "receive": "receive and check, s",
        "prepare": "move, pack, collect, measure, s",
    }  # fmt: skip
    rows = [["host of a replica's first rank", "a step", "basis"]]
    for name, value in plan.host.to_json().items():
        size = 2**20 if names[name].endswith("MiB") else GIB if names[name].endswith("GiB") else 1
        rows.append([names[name], f"{value / size:.2f}", basis["host"][name]])
    return table(rows)


def config_lines(plan: Plan, work: Workload) -> str:
    """The config keys of this layout."""
    parallel = plan.parallel
    sizes = [
        f"  {key}: {str(value).lower()}" for key, value in dataclasses.asdict(parallel).items()
        if key.endswith(("_size", "_in_pipeline_split")) and value
    ]  # fmt: skip
    return "\n".join([
        "model:", f"  recompute_granularity: {plan.recompute}", "parallel:", *sizes, "training:",
        f"  global_batch_size: {work.global_batch_size}", f"  max_tokens_per_micro_batch: {plan.budget}",
    ])  # fmt: skip


def assumptions_table(assume: Assumptions) -> str:
    """Every assumption with its value and reason."""
    why, values = reasons(), dataclasses.asdict(assume)
    rows = [[name, f"{value:g}", why[name]] for name, value in values.items()]
    return table([["assumption", "value", "reason"], *rows])


def whole_page(found: Search, shape: ModelShape, work: Workload, cluster: Cluster, assume: Assumptions,
               top: int) -> str:
    """The plan as printed."""
    best, basis = found.plans[0], basis_of(shape, work)
    parts = [
        describe(shape, work, cluster),
        f"{len(found.plans)} of {found.considered} layouts fit with {100 * assume.reserve:g} % left free; "
        f"the {min(top, len(found.plans))} fastest, all figures {ESTIMATED}:",
        ranking(found.plans[:top], cluster),
        f"The fastest, {name_of(best.parallel)} with recompute {best.recompute}:",
        memory_table(best, basis), collectives_table(best, basis), time_table(best, basis),
        host_table(best, basis), EXPLAINED,
        f"Limited by, {ESTIMATED}:\n" + "\n".join(f"- {text}" for text in limits(best, cluster)),
        "In the config:\n\n" + config_lines(best, work),
        "Assumed, not measured (--assume name=value changes one):",
        assumptions_table(assume),
    ]  # fmt: skip
    return "\n\n".join(parts)


def scale_table(rows: Sequence[tuple[int, Plan | None, Cluster, str]]) -> str:
    """Step time and its parts, one row per number of training GPUs; the reason where no layout fits."""
    head = ["GPUs", "layout", "recompute", "GiB", "step s", "efficiency", "products", "again", "communication",
            "bubble", "generation", "new weights", "limited by"]
    lines = [head]
    base = next(((gpus * plan.time.total) for gpus, plan, _, _ in rows if plan is not None), 0.0)
    for gpus, plan, cluster, reason in rows:
        if plan is None:
            lines.append([f"{gpus:,}", reason, *[""] * (len(head) - 2)])
            continue
        time = plan.time
        talk = time.tensor + time.expert + time.context + time.pipeline + time.data
        shares = [time.products + time.attention, time.recompute, talk, time.bubble, time.generation, time.sync]
        lines.append([
            f"{gpus:,}", name_of(plan.parallel), plan.recompute, f"{plan.memory.total / GIB:.0f}", f"{time.total:.0f}",
            f"{100 * base / (gpus * time.total):.0f} %", *(f"{100 * part / time.total:.0f} %" for part in shares),
            limits(plan, cluster)[0].partition(":")[0],
        ])  # fmt: skip
    return f"{table(lines)}\n\nAll figures are {ESTIMATED}."
