"""Where the time of a training step goes on one GPU, and what each choice is worth.

At the sizes of `benchmarks/gpu.py`, in bfloat16:

- ceilings: a copy, a large matrix product, an empty launch;
- rows: the head, the layer and the training step with torch layers, with the kernels of
  `megatron_gspo/kernels` and without them;
- head: with each memory budget for its logits (`training.log_prob_memory_gib`);
- profile: every GPU kernel of the head, the layer and the step, with its launches and time.

The result is written after each section, so that what is measured is kept if time runs out. The
speeds of `tools/rehearse/rates.yaml` are of such a profile.

    python -m benchmarks.gpu_probe               # all sections, about five minutes
    python -m benchmarks.gpu_probe rows head     # these
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.common import RESULTS, machine_kind, say
from benchmarks.gpu import REAL, Sizes, Work, measured, peak_tflops, works
from benchmarks.result_files import save
from megatron_gspo import kernels

GIB = 2**30
BUDGETS_GIB = (0.25, 1.0, 4.0, 16.0)
_COPY_BYTES = 1 << 30
_LAUNCHES = 1000

Section = Callable[[Sizes, float | None], dict[str, Any]]


@contextmanager
def row_kernels(on: bool) -> Iterator[None]:
    """Within the context the kernels are wanted, or not."""
    before = os.environ.get(kernels.SWITCH)
    os.environ[kernels.SWITCH] = "1" if on else "0"
    kernels.can_compile.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del os.environ[kernels.SWITCH]
        else:
            os.environ[kernels.SWITCH] = before
        kernels.can_compile.cache_clear()


def torch_works(sizes: Sizes) -> Iterator[Work]:
    """The rows with torch layers."""
    for work in works(sizes):
        if work.implementation == "torch":
            yield work


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ceilings(sizes: Sizes, peak: float | None) -> dict[str, Any]:
    """TB/s of a copy, TFLOP/s of a product, microseconds of a launch in a row of them."""
    device = _device()
    source = torch.empty(min(_COPY_BYTES, sizes.tokens << 16), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    small = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1.0)

    def milliseconds(call: Callable[[], Any]) -> float:
        work = Work("", "torch", 0, 0.0, call)
        return measured(work, sizes, None).milliseconds.median

    product = measured(gpu.product(sizes, device), sizes, peak)
    return {
        "copy_tb_per_second": 2e-9 * source.numel() / milliseconds(lambda: target.copy_(source)),
        "product_tflops": product.tflops,
        "launch_microseconds": 1e3 * milliseconds(launches) / _LAUNCHES,
    }


def rows(sizes: Sizes, peak: float | None) -> dict[str, Any]:
    """Each row by "with kernels" and "without kernels"."""
    measurements: dict[str, Any] = {}
    for on, name in ((True, "with kernels"), (False, "without kernels")):
        with row_kernels(on):
            measurements[name] = [
                asdict(measured(work, sizes, peak)) for work in torch_works(sizes)
            ]
    return measurements


def head(sizes: Sizes, peak: float | None) -> dict[str, Any]:
    """The row of the head by its budget in GiB."""
    from megatron_gspo.models import family_of

    _, shape = family_of(gpu.model_config(sizes))
    measurements: dict[str, Any] = {}
    try:
        for budget in BUDGETS_GIB:
            work = gpu.head(sizes, shape, _device(), int(budget * GIB))
            measurements[f"{budget:g}"] = asdict(measured(work, sizes, peak))
    except torch.OutOfMemoryError as error:
        measurements["stopped"] = str(error).splitlines()[0]
    return measurements


def profile(sizes: Sizes, peak: float | None) -> dict[str, Any]:
    """Of each row every kernel: name, launches, milliseconds; the longest first."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    profiles: dict[str, Any] = {}
    for work in torch_works(sizes):
        for _ in range(sizes.warmup):
            work.call()
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as seen:
            work.call()
            if on_gpu:
                torch.cuda.synchronize()
        entries = [
            {
                "name": event.key,
                "launches": event.count,
                "milliseconds": 1e-3
                * (event.self_device_time_total if on_gpu else event.self_cpu_time_total),
            }
            for event in seen.key_averages()
        ]
        profiles[work.name] = sorted(entries, key=lambda entry: -entry["milliseconds"])
    return profiles


SECTIONS: dict[str, Section] = {
    "ceilings": ceilings,
    "rows": rows,
    "head": head,
    "profile": profile,
}


def probe(names: Sequence[str], sizes: Sizes, peak: float | None) -> Iterator[tuple[str, Any]]:
    """Sections by name, one after the other. One that fails is told, and the others go on."""
    for name in names:
        began = time.monotonic()
        try:
            section = SECTIONS[name](sizes, peak)
        except Exception as error:  # the time on a borrowed GPU is short
            section = {"failed": f"{type(error).__name__}: {error}"}
        yield name, section | {"seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "gpu" / "probe", help="folder (%(default)s)"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; the sections are {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        print("benchmarks/gpu_probe.py: skipped: no CUDA GPU")
        return
    report = gpu.result([], peak_tflops(torch.cuda.get_device_name()))
    del report["rows"]
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / f"{report['date']}-{machine_kind(report['hardware'])}.json"
    sizes = replace(REAL, repeats=5)
    for name, section in probe(args.sections or list(SECTIONS), sizes, report["peak_tflops"]):
        report[name] = section
        save(file, report)
        say(f"{name}: {section['seconds']:.0f} s{', failed' if 'failed' in section else ''}")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
