"""The page of the documentation, from the measured records."""

from __future__ import annotations

import re
from typing import Any

from tests.equivalence.layouts import DENSE, MOE
from tests.equivalence.tolerances import REASON, TOLERANCES

Record = dict[str, Any]

INTRO = """# The same gradient in every layout

<!-- written by `make proof`; edit tests/equivalence/page.py instead -->

Parallel layouts are where reinforcement-learning code goes silently wrong: a reduction that is missing, a mean taken
over the wrong ranks, a share of a sequence that is counted twice. So every combination of parallel dimensions is
compared with one process that has none: the Hugging Face model in double precision, the objective as a loop over
sequences and tokens, torch's AdamW. On two CPU cores, for anyone to repeat:

    make proof                                              # this page, under the installed megatron-core
    pytest "tests/equivalence/test_layouts.py::test_moe[tp2-pp1-cp2-dp1-ep2-etp1]"     # one row of it

## What is compared

Two tiny random models, a Qwen3-MoE (4 layers, 8 experts of which 2 are active) and a dense Qwen3, in {moe} and
{dense} layouts: all combinations of tensor (with sequence parallelism; the dense model also without), pipeline (plain
and interleaved), context, data, expert and expert-tensor parallelism with one or two ranks each, in at most 8
processes. In each of them, on every rank:

- three objectives: `gspo` (level `sequence`), `gspo_token` (`sequence_token`, an advantage per token, dual clip, KL)
  and `grpo` (`token`, temperature 0.8, dual clip, KL and entropy bonus); packed micro-batches for all, one sequence a
  micro-batch for one of them in turn;
- activations recomputed not at all, selectively or fully, in turn;
- a mini-batch with unequal lengths, masks with holes, a response of one token, a sequence without a trained token and
  one beyond the clamp of the log-ratio;
- log-probs and entropies, the loss, the gradient of every parameter, every metric that a training step reports;
- the change of every weight, the gradient norm, the learning rate and all metrics over three optimizer steps on three
  different mini-batches, with and without the distributed optimizer (both up to two processes, in turn above):
  warm-up and cosine, gradient clipping, weight decay on matrices and none on norms.

With experts also [routing replay](routing_replay.md): `grpo` with random routes replayed, against the reference that is
given the same routes; routes that are recorded, against the reference's own, token by token and layer by layer; what
every router did in the passes that replay them, recomputations included; the routers' entropy and load; and log-probs
under replay against those of the pass that recorded.

Every combination of a parallel size with an objective, a cut, a recomputation and an optimizer occurs; a test checks
that. Other objectives and cuts, communication that overlaps with computation, the allgather dispatcher, tied
embeddings with a padded vocabulary and dense layers between experts have cases of their own in
`tests/equivalence/test_layouts.py`.

## Tolerances, and their reason

An error of a gradient or of a weight change is the norm of a parameter's difference relative to the norm of its true
value (to a thousandth of the typical norm where that is smaller), and the worst parameter counts. Errors of losses
and metrics are relative to their own value, those of log-probs and entropies absolute, in nats.
"""

DEFECTS = """
A defect is not a matter of tolerance. The same comparison between the truth and the truth with one thing wrong:

| What is wrong | Gradient error |
| --- | --- |
"""

COLUMNS = {"gradient": "gradient", "loss": "loss", "metric": "metric", "update": "weight change"}


def render(records: list[Record]) -> str:
    """The whole page; ``records`` as ``table.measure`` makes them, one for each version of megatron-core."""
    parts = [
        INTRO.format(moe=len(MOE), dense=len(DENSE)), _tolerances(records), REASON, DEFECTS, _defects(records[-1]),
        _environments(records),
    ]  # fmt: skip
    versions = " / ".join(r["versions"]["megatron-core"] for r in records)
    parts.append(
        f"\n## Layout by layout\n\nThe worst error on any rank, in units of 1e-6, for megatron-core {versions}, and "
        "the kind of parameter with the worst gradient.\n`i` in a name: interleaved; `nosp`: without sequence "
        "parallelism.\n"
    )
    for model, title in (("moe", "Mixture of experts"), ("dense", "Dense")):
        parts.append(f"\n### {title}\n\n" + _layouts(records, model))
    return "".join(parts)


def _tolerances(records: list[Record]) -> str:
    lines = ["", "| Error | One process | All layouts | Tolerance |", "| --- | --- | --- | --- |"]
    for kind, tolerance in TOLERANCES.items():
        rows = [(row["processes"], row["errors"][kind][0])
                for r in records for layouts in r["layouts"].values() for row in layouts.values()
                if kind in row["errors"]]  # fmt: skip
        alone = max(error for processes, error in rows if processes == 1)
        lines.append(f"| {kind} | {alone:.1e} | {max(error for _, error in rows):.1e} | {tolerance:.0e} |")
    return "\n".join(lines) + "\n"


def _defects(record: Record) -> str:
    names = next(iter(record["defects"].values()))
    smallest = {name: min(found[name] for found in record["defects"].values()) for name in names}
    return "".join(f"| {name} | {error:.0e} |\n" for name, error in sorted(smallest.items(), key=lambda item: -item[1]))


def _environments(records: list[Record]) -> str:
    columns = ("megatron-core", "torch", "transformers", "Python", "Machine", "Date")
    lines = ["\n## Where and when\n", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for r in records:
        cells = [*(r["versions"][name] for name in columns[:3]), r["python"], r["machine"], r["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    if len(records) > 1 and all(r["layouts"] == records[0]["layouts"] for r in records):
        lines.append("\nEvery figure below is the same under all: they do the same arithmetic in the same order.")
    return "\n".join(lines) + "\n"


def _layouts(records: list[Record], model: str) -> str:
    lines = ["| Layout | Processes | " + " | ".join(COLUMNS.values()) + " | worst parameter |",
             "| --- " * (len(COLUMNS) + 3) + "|"]  # fmt: skip
    for name, first in records[0]["layouts"][model].items():
        rows = [r["layouts"][model][name] for r in records]
        cells = [" / ".join(f"{1e6 * row['errors'][kind][0]:.1f}" for row in rows) for kind in COLUMNS]
        _, where = max(row["errors"]["gradient"] for row in rows)
        lines.append(f"| `{name}` | {first['processes']} | " + " | ".join(cells) + f" | {parameter_kind(where)} |")
    return "\n".join(lines) + "\n"


def parameter_kind(where: str) -> str:
    """``rank 1, gspo, packed: model.layers.2.mlp.experts.3.up_proj.weight`` -> ``mlp.experts.up_proj``."""
    name = where.rsplit(": ", 1)[-1]
    return re.sub(r"\.\d+(?=\.)", "", name).removeprefix("model.").removeprefix("layers.").removesuffix(".weight")


def layouts_on(page: str, title: str) -> list[str]:
    """The names in the table under a heading of the page."""
    section = page.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
