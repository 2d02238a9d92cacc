"""The prediction of the rehearsal beside each committed measurement of `benchmarks/gpu.py`.

The same calls run on a fake GPU, and their operations are priced by the speeds of
``tools/rehearse/rates.yaml``, which says which of them were fitted on which row; all other rows
test the prediction. The code of today is rehearsed: what has become faster since a measurement
shows as a negative error. Transformer Engine's rows are left out, since its kernels are not
rehearsed.

    python -m benchmarks.gpu_predicted            # for all of benchmarks/results/gpu, half a minute
    python -m benchmarks.gpu_predicted --classes  # also the time of each class of operations
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_gspo.tools.rehearse.fake_device.library import import_torch_with_fake_device

RESULTS = Path(__file__).parent / "results" / "gpu"
VARLEN_SINCE = (2, 12)  # torch's variable-length attention with what the layers need


def rehearsed_ops(sizes: Any, has_varlen: bool) -> dict[str, list[Any]]:
    """The operations of the second call of each row, as `OpTotal`.

    The process must have the fake device.
    """
    import torch

    from megatron_gspo.tools.rehearse.fake_device.cuda_api import fake_cuda
    from megatron_gspo.tools.rehearse.fake_device.fused_functions import fused_functions
    from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu

    torch.set_num_threads(1)
    gpu = FakeGpu()
    with fake_cuda(gpu.host):
        from benchmarks.gpu import works
        from megatron_gspo.mcore import attention
        from megatron_gspo.tools.rehearse.fake_world import fake_world

        with (
            mock.patch.object(
                attention, "_has_varlen_options", lambda: has_varlen
            ),  # as the torch of the results
            fused_functions(gpu.host),
            fake_world(0, 1, gpu.collectives),
            torch.autograd.set_multithreading_enabled(False),
            gpu.memory.watch_resizes(),
            gpu,
        ):
            for work in works(sizes):
                with gpu.phase("first call", "activations"):
                    work.call()
                with gpu.phase(work.name, "activations"):
                    work.call()
                del work
    ops: dict[str, list[Any]] = {}
    for total in gpu.ops.totals:
        ops.setdefault(total.phase, []).append(total)
    return ops


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    heading = ["GPU", "what", "predicted, ms", "measured, ms", "error"]
    lines = ["| " + " | ".join(row) + " |" for row in (heading, *rows)]
    lines.insert(1, "| --- | --- | ---: | ---: | ---: |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--classes", action="store_true", help="also the time of each class")
    args = parser.parse_args()
    import_torch_with_fake_device()
    from benchmarks.gpu import REAL
    from megatron_gspo.gpus import GPUS
    from megatron_gspo.tools.plan.plan_report import table as padded_table
    from megatron_gspo.tools.rehearse.op_times import rates_of, times_by
    from megatron_gspo.tools.rehearse.time_tables import time_rows

    files = [json.loads(file.read_text()) for file in sorted(args.results.glob("*.json"))]
    ops: dict[bool, dict[str, list[Any]]] = {}
    rows = []
    for result in files:
        version = tuple(int(part) for part in result["versions"]["torch"].split(".")[:2])
        has_varlen = version >= VARLEN_SINCE
        if has_varlen not in ops:
            ops[has_varlen] = rehearsed_ops(REAL, has_varlen)
        words = result["hardware"]["gpu"].lower().split()
        gpu = next(gpu for name, gpu in GPUS.items() if name in words)
        rates = rates_of(gpu)
        for row in result["rows"]:
            if row["implementation"] != "torch":
                continue
            priced = times_by(ops[has_varlen][row["name"]], rates, lambda op: op.op_class)
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
