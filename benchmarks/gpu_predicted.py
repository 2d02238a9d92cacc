"""The prediction of the rehearsal beside each committed measurement of `benchmarks/gpu.py`.

The same calls run on a fake GPU, and their operations are priced by the speeds of
``tools/rehearse/rates.yaml``, which says which of them were fitted on which row; all other rows
test the prediction. The code of today is rehearsed: what has become faster since a measurement
shows as a negative error. Transformer Engine's rows are left out, since its kernels are not
rehearsed.

    python -m benchmarks.gpu_predicted            # for all of benchmarks/results/gpu, half a minute
    python -m benchmarks.gpu_predicted --classes  # also the time of each class of operations
    python -m benchmarks.gpu_predicted --expert-parallel 8  # one more layer, and all, their experts on 8 GPUs
    python -m benchmarks.gpu_predicted --centred-by 32  # the head with score centering, and without
    python -m benchmarks.gpu_predicted --picture docs/images/step.svg  # the parts of a step
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

RESULTS = Path(__file__).parent / "results" / "gpu"
VARLEN_SINCE = (2, 12)  # torch's variable-length attention with what the layers need
FREE_BYTES = 48 * 2**30  # beside the step, on a GPU of 80 GB


@dataclass(frozen=True)
class Rehearsed:
    """The second call of a row. ops: `OpTotal`s; collectives: `Collective`s."""

    ops: list[Any]
    collectives: list[Any]


def rehearsed_rows(sizes: Any, has_varlen: bool) -> dict[str, Rehearsed]:
    """Of the first of ``sizes.expert_parallel`` GPUs. With several there is no training step, whose
    samples would have to be divided.

    The process must have the fake device.
    """
    import torch

    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_device.fused_functions import fused_functions
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

    torch.set_num_threads(1)
    gpus = sizes.expert_parallel
    gpu = FakeGpu(expert_parallel=gpus)
    with fake_cuda(gpu.host, FREE_BYTES):
        from benchmarks.gpu import works
        from megatron_gspo.mcore import attention
        from megatron_gspo.tools.rehearse.fake_world import fake_world

        with (
            mock.patch.object(
                attention, "_has_varlen_options", lambda: has_varlen
            ),  # as the torch of the results
            fused_functions(gpu.host),
            fake_world(0, gpus, gpu.collectives),
            torch.autograd.set_multithreading_enabled(False),
            gpu.memory.watch_resizes(),
            gpu,
        ):
            for work in works(sizes):
                if gpus == 1 or work.name != "training step":
                    for phase in ("first call", work.name):
                        with gpu.phase(phase, "activations"):
                            work.call()
                del work
    rows: dict[str, Rehearsed] = {}
    for total in gpu.ops.totals:
        rows.setdefault(total.phase, Rehearsed([], [])).ops.append(total)
    for call in gpu.collectives.collectives:
        if call.phase in rows:
            rows[call.phase].collectives.append(call)
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    heading = ["GPU", "what", "predicted, ms", "measured, ms", "error"]
    lines = ["| " + " | ".join(row) + " |" for row in (heading, *rows)]
    lines.insert(1, "| --- | --- | ---: | ---: | ---: |")
    return "\n".join(lines)


def shared_layer(gpus: int, has_varlen: bool) -> str:
    """A layer whose experts so many GPUs share, on an H100: what two layers take beyond one, so that
    neither the embedding nor the last norm is counted. And a pass over all layers, forward and
    backward without an optimizer, with the head.
    """
    from benchmarks.gpu import MODEL, REAL, head_flops, layer_flops
    from megatron_gspo.gpus import GPUS
    from megatron_gspo.models import family_of, read_config
    from megatron_gspo.tools.rehearse.op_cost import PRODUCT_CLASSES
    from megatron_gspo.tools.rehearse.op_times import (
        LINK_EFFICIENCY,
        OpTime,
        collective_seconds,
        rates_of,
        times_by,
    )

    gpu = GPUS["h100"]

    def seconds(row: Rehearsed) -> float:
        return sum(time.seconds for time in times_by(row.ops, rates_of(gpu), str).values())

    def exchange_seconds(row: Rehearsed) -> float:
        return sum(collective_seconds(call, 0, gpu, LINK_EFFICIENCY) for call in row.collectives)

    def outside_of_products(row: Rehearsed) -> OpTime:
        times = times_by(row.ops, rates_of(gpu), lambda op: op.op_class)
        outside = [time for name, time in times.items() if name not in PRODUCT_CLASSES]
        return sum(outside, OpTime())

    def rows_of(layers: int) -> dict[str, Rehearsed]:
        sizes = replace(REAL, model={"num_hidden_layers": layers}, expert_parallel=gpus)
        return rehearsed_rows(sizes, has_varlen)

    one_layer = rows_of(1)
    shallow = one_layer["layer"]
    deep = rows_of(2)["layer"]
    outside_of_two = outside_of_products(deep)
    outside_of_one = outside_of_products(shallow)
    moved = outside_of_two.bytes - outside_of_one.bytes
    launches = outside_of_two.launches - outside_of_one.launches
    layer = seconds(deep) - seconds(shallow)
    exchange = exchange_seconds(deep) - exchange_seconds(shallow)

    _, shape = family_of(read_config(MODEL.parent))
    more = shape.num_layers - 1
    lengths = [REAL.prompt + REAL.response] * REAL.sequences
    flops = 3 * (layer_flops(shape, lengths) + head_flops(shape, REAL.tokens))
    whole = seconds(shallow) + more * layer + seconds(one_layer["head"])
    exposed = whole + exchange_seconds(shallow) + more * exchange
    return (
        f"one more layer: {moved / 1e9:.1f} GB outside of products and attention in {launches}"
        f" launches, {1e3 * layer:.1f} ms, and {1e3 * exchange:.1f} ms of collectives;"
        f" {shape.num_layers} layers and the head: {1e3 * whole:.0f} ms, {flops / whole / gpu.flops:.0%} of"
        f" the peak, with collectives {1e3 * exposed:.0f} ms, {flops / exposed / gpu.flops:.0%}"
    )


def centred_head(count: int) -> str:
    """The head on an H100 with and without score centering by so many ids."""
    from benchmarks.gpu import REAL
    from megatron_gspo.gpus import GPUS
    from megatron_gspo.tools.rehearse.op_times import rates_of, times_by

    rehearsed = rehearsed_rows(replace(REAL, centred_by=count), has_varlen=False)
    rates = rates_of(GPUS["h100"])
    plain, centred = (
        1e3 * sum(time.seconds for time in times_by(rehearsed[name].ops, rates, str).values())
        for name in ("head", "centred head")
    )
    return (
        f"head {plain:.2f} ms, with score centering by {count} ids {centred:.2f} ms"
        f" (+{100 * (centred / plain - 1):.1f} %)"
    )


_HEAD = "megatron_gspo/parallel/"
_OPTIMIZER = (
    "megatron/core/optimizer/",
    "mcore/adam.py",
    "patches/gradient_norm.py",
    "param_and_grad_buffer.py",
)


def part_of(op: Any) -> str:
    """The part of a training step that an `OpTotal` belongs to."""
    from megatron_gspo.tools.rehearse.op_cost import PRODUCT_CLASSES

    if any(place in op.where for place in _OPTIMIZER):
        return "optimizer, clipping"
    if op.where.startswith(_HEAD):
        return "head: products" if op.op_class in PRODUCT_CLASSES else "head: all else"
    if op.op_class == "attention":
        return "layer: attention"
    return "layer: products" if op.op_class in PRODUCT_CLASSES else "layer: all else"


# Colours that stand out from white as much as from black, whatever the page's theme.
_STYLE = "text { font: 13px sans-serif; fill: #6e7781 } rect { fill: #3b82c4 }"
_WIDTH = 400
_BARS = (128, 340)  # from the labels to the numbers
_LINE = 26


def picture(milliseconds: Mapping[str, float]) -> str:
    """An SVG with a bar for each part; readable on white and black, at its 400 pixels."""
    start, end = _BARS
    scale = (end - start) / max(milliseconds.values())
    height = _LINE * len(milliseconds)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        f' viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<style>{_STYLE}</style>",
    ]
    for i, (name, value) in enumerate(milliseconds.items()):
        top = i * _LINE
        width = value * scale
        lines += [
            f'<text x="{start - 6}" y="{top + 18}" text-anchor="end">{name}</text>',
            f'<rect x="{start}" y="{top + 4}" width="{width:.1f}" height="{_LINE - 8}"/>',
            f'<text x="{start + width + 6:.1f}" y="{top + 18}">{value:.1f} ms</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def step_picture() -> str:
    """The parts of the training step on an H100, by `picture`; the longest first."""
    from benchmarks.gpu import REAL
    from megatron_gspo.gpus import GPUS
    from megatron_gspo.tools.rehearse.op_times import rates_of, times_by

    step = rehearsed_rows(REAL, has_varlen=False)["training step"]  # as with torch 2.11
    times = times_by(step.ops, rates_of(GPUS["h100"]), part_of)
    return picture({name: 1e3 * time.seconds for name, time in times.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--classes", action="store_true", help="also the time of each class")
    parser.add_argument(
        "--expert-parallel",
        type=int,
        metavar="N",
        help="only what one more layer, and all of them, take whose experts N GPUs share",
    )
    parser.add_argument(
        "--centred-by", type=int, metavar="K", help="only the head with score centering by K ids"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="only draw the parts of a step on an H100"
    )
    args = parser.parse_args()
    import_torch_with_fake_device()
    if args.picture:
        args.picture.write_text(step_picture(), encoding="utf-8")
        return
    if args.centred_by:
        print(centred_head(args.centred_by))
        return
    if args.expert_parallel:
        for has_varlen, torch in ((False, "torch 2.11"), (True, "torch 2.12 or newer")):
            print(f"{torch}: {shared_layer(args.expert_parallel, has_varlen)}")
        return
    from benchmarks.gpu import REAL
    from megatron_gspo.gpus import GPUS
    from megatron_gspo.tools.plan.plan_report import table as padded_table
    from megatron_gspo.tools.rehearse.op_times import rates_of, times_by
    from megatron_gspo.tools.rehearse.time_tables import time_rows

    files = [json.loads(file.read_text()) for file in sorted(args.results.glob("*.json"))]
    rehearsed: dict[bool, dict[str, Rehearsed]] = {}
    rows = []
    for result in files:
        version = tuple(int(part) for part in result["versions"]["torch"].split(".")[:2])
        has_varlen = version >= VARLEN_SINCE
        if has_varlen not in rehearsed:
            rehearsed[has_varlen] = rehearsed_rows(REAL, has_varlen)
        words = result["hardware"]["gpu"].lower().split()
        gpu = next(gpu for name, gpu in GPUS.items() if name in words)
        rates = rates_of(gpu)
        for row in result["rows"]:
            if row["implementation"] != "torch":
                continue
            priced = times_by(rehearsed[has_varlen][row["name"]].ops, rates, lambda op: op.op_class)
            predicted = 1e3 * sum(time.seconds for time in priced.values())
            measured = row["milliseconds"]["median"]
            rows.append(
                [
                    gpu.name,
                    f"{row['name']}, {row['tokens']:,} tokens",
                    f"{predicted:.1f}",
                    f"{measured:.1f}",
                    f"{100 * (predicted / measured - 1):+.0f} %",
                ]
            )
            if args.classes:
                print(f"{gpu.name}, {row['name']}:\n\n{padded_table(time_rows(priced, 'class'))}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
