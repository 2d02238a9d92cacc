"""The page of the documentation, from the measured records."""

from __future__ import annotations

import re
from typing import Any

from tests.equivalence.layouts import DENSE, MOE
from tests.equivalence.tolerances import OF_LORA, REASON, TOLERANCES

Record = dict[str, Any]

INTRO = """# Equivalence of parallel layouts

<!-- written by `make proof`; edit tests/equivalence/page.py instead -->

For readers who judge correctness: is the gradient the same in every parallel layout, and how close to the exact one?

Every combination of parallel dimensions is compared with a reference in one process: the Hugging Face model in float64,
the objective as a loop over sequences and tokens, and torch's AdamW:

    make proof                                              # writes this page, with the installed megatron-core
    pytest "tests/equivalence/test_layouts.py::test_moe[tp2-pp1-cp2-dp1-ep2-etp1]"     # one layout

## What is compared

Two tiny random models, a Qwen3-MoE (4 layers, 8 experts, 2 active) in {moe} layouts and a dense Qwen3 in {dense}: all
combinations of tensor, pipeline (plain and interleaved), context, data, expert and expert-tensor parallelism with one
or two ranks each, up to 8 processes on two CPU cores. On every rank:

- objectives `gspo`, `gspo_token` (advantages per token, dual clip, KL) and `grpo` (temperature 0.8, dual clip, KL,
  entropy bonus); packed micro-batches, and one sequence per micro-batch; no, selective and full recomputation, in turn;
- a mini-batch with unequal lengths, masks with gaps, a response of one token, a sequence without a trained token and
  one beyond the clamp of the log-ratio;
- log-probs, entropies, loss, the gradient of every parameter, and every metric of a training step;
- over three optimizer steps, with and without the distributed optimizer: every weight, the gradient norm, the learning
  rate and all metrics (warm-up, cosine, clipping, weight decay);
- with experts, [routing replay](routing_replay.md): random routes replayed, routes recorded, the routers' choice in
  every pass including recomputation, entropy, load, and log-probs under replay against those of the recording pass.

A test checks that every parallel size occurs with every objective, cut, recomputation and optimizer. Communication
overlap, the allgather dispatcher, tied embeddings with a padded vocabulary and dense layers between experts have their
own cases in `tests/equivalence/test_layouts.py`. The other [families](models.md) are compared in a third of the layouts
each, dense ones in two thirds, with all choices in turn: every feature is on, and biases are drawn so that a dropped
one changes routes. [Adapters](lora.md) are compared with PEFT on Transformers, and those that experts share with a
loop: the gradient of every adapter, log-probs with the adapters off, and no value of the base may change.

## Tolerances

The error of a gradient or weight change is the norm of a parameter's difference over the norm of its exact value (at
least a thousandth of the typical norm); the worst parameter counts. Errors of losses and metrics are relative, those of
log-probs and entropies absolute, in nats.
"""

DEFECTS = """
For scale, the gradient error after one mistake in the reference:

| mistake | gradient error |
| --- | --- |
"""

OTHER_FAMILIES = {
    "deepseek": "DeepSeek-V3: YaRN, groups of experts", "moonlight": "Moonlight: queries without a latent",
    "gpt_oss": "gpt-oss: sinks, windows, biased experts",
    "next": "Qwen3-Next: gated delta nets, gated attention",
    "minimax": "MiniMax-M2: norms over all heads",
    "qwen35_moe": "Qwen3.5: language model with experts", "qwen35": "Qwen3.5: dense language model, tied embeddings",
    "windows": "Qwen3: YaRN, windows in two layers", "moe_windows": "Qwen3-MoE: YaRN, windows in all layers",
    "glm_lite": "GLM-4.7-Flash: halves rotated", "glm": "GLM-4.5: grouped queries, half of each head rotated",
}  # fmt: skip
ADAPTERS = {
    "lora_each": "LoRA of all linear layers, each expert's own", "lora_shared": "LoRA shared by a layer's experts",
    "lora_some": "LoRA of some layers of the dense model", "lora_latent": "LoRA of DeepSeek-V3",
    "lora_router": "LoRA of all linear layers and the router",
    "lora_dense_parts": "LoRA of Qwen2-MoE, with a shared expert",
}  # fmt: skip
COLUMNS = 3  # layouts in a line


def render(records: list[Record]) -> str:
    """The whole page; ``records`` as ``table.measure`` makes them, one for each version of megatron-core."""
    parts = [
        INTRO.format(moe=len(MOE), dense=len(DENSE)), _tolerances(records), REASON, DEFECTS, _defects(records[-1]),
        _environments(records),
    ]  # fmt: skip
    versions = " / ".join(r["versions"]["megatron-core"] for r in records)
    parts.append(
        "\n## Layout by layout\n\nThe largest relative gradient error on any rank, times 1e6, for megatron-core\n"
        f"{versions}. `i`: interleaved; `nosp`: without sequence parallelism.\n"
    )
    titles = {"moe": "Mixture of experts", "dense": "Dense", **OTHER_FAMILIES, **ADAPTERS}
    for model, title in titles.items():
        if not all(model in r["layouts"] for r in records):  # measured before the family was added
            continue
        parts.append(f"\n### {title}\n\n" + _layouts(records, model))
    return "".join(parts)


def _tolerances(records: list[Record]) -> str:
    lines = ["", "| error | one process | all layouts | tolerance |", "| --- | --- | --- | --- |"]
    for kind, tolerance in (TOLERANCES | OF_LORA).items():
        rows = [(row["processes"], row["errors"][kind][0])
                for r in records for layouts in r["layouts"].values() for row in layouts.values()
                if kind in row["errors"]]  # fmt: skip
        if not rows:
            continue
        alone = max(error for processes, error in rows if processes == 1)
        lines.append(f"| {kind} | {alone:.1e} | {max(error for _, error in rows):.1e} | {tolerance:.0e} |")
    return "\n".join(lines) + "\n"


def _defects(record: Record) -> str:
    names = next(iter(record["defects"].values()))
    smallest = {name: min(found[name] for found in record["defects"].values()) for name in names}
    return "".join(f"| {name} | {error:.0e} |\n" for name, error in sorted(smallest.items(), key=lambda item: -item[1]))


def _environments(records: list[Record]) -> str:
    columns = ("megatron-core", "torch", "transformers", "Python", "machine", "date")
    lines = ["\n## Environment\n", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for r in records:
        cells = [*(r["versions"][name] for name in columns[:3]), r["python"], r["machine"], r["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    if len(records) > 1 and all(r["layouts"] == records[0]["layouts"] for r in records):
        lines.append("\nAll figures below are the same for all versions.")
    return "\n".join(lines) + "\n"


def _layouts(records: list[Record], model: str) -> str:
    cells = []
    for name in records[0]["layouts"][model]:
        errors = [r["layouts"][model][name]["errors"]["gradient"][0] for r in records]
        cells.append(f"{name} {'/'.join(f'{1e6 * error:.1f}' for error in errors)}")
    width = max(map(len, cells)) + 2
    lines = [cells[start : start + COLUMNS] for start in range(0, len(cells), COLUMNS)]
    rows = ["".join(cell.ljust(width) for cell in line).rstrip() for line in lines]
    return "\n".join(["```text", *rows, "```\n"])


def layouts_on(page: str, title: str) -> list[str]:
    """The layouts listed under a heading of the page."""
    section = page.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"\b(tp\d\S+) \d", section)
