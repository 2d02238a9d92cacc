"""Where the time of a training step goes on one GPU, and what each choice is worth.

At the sizes of `benchmarks/gpu.py`, in bfloat16:

- ceilings: a copy, a large matrix product, an empty launch;
- rows: the head, the layer and the training step with torch layers, with the kernels of
  `megatron_gspo/kernels` and without them;
- switches: the layer and the step without each of the kernels, and without torch's variable-length
  attention;
- head: with each memory budget for its logits (`training.log_prob_memory_gib`);
- profile: every GPU kernel of the head, the layer and the step, with its launches and time.

A section ends after the measurement with which it exceeds its time. The result is written after
each measurement, so that what is measured is kept. The speeds of `tools/rehearse/rates.yaml` are of
such a profile.

    python -m benchmarks.gpu_probe               # all sections, about six minutes
    python -m benchmarks.gpu_probe rows head     # these
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

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

Measurements = Iterator[tuple[str, Any]]
"""Each with its name."""


def row_kernels(value: str) -> AbstractContextManager[Any]:
    """Within the context ``MEGATRON_GSPO_KERNELS`` has a value."""
    return mock.patch.dict(os.environ, {kernels.SWITCH: value})


def padded_attention() -> AbstractContextManager[Any]:
    """Within the context layers have the attention of torch 2.11."""
    from megatron_gspo.mcore import attention

    return mock.patch.object(attention, "_has_varlen_options", lambda: False)


def torch_works(sizes: Sizes) -> Iterator[Work]:
    """The rows with torch layers."""
    for work in works(sizes):
        if work.implementation == "torch":
            yield work


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ceilings(sizes: Sizes, peak: float | None) -> Measurements:
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

    yield (
        "copy_tb_per_second",
        2e-9 * source.numel() / milliseconds(lambda: target.copy_(source)),
    )
    yield "product_tflops", measured(gpu.product(sizes, device), sizes, peak).tflops
    yield "launch_microseconds", 1e3 * milliseconds(launches) / _LAUNCHES


def rows(sizes: Sizes, peak: float | None) -> Measurements:
    """All rows "with kernels" and "without kernels"."""
    for value, name in (("1", "with kernels"), ("0", "without kernels")):
        with row_kernels(value):
            yield name, [asdict(measured(work, sizes, peak)) for work in torch_works(sizes)]


def switches(sizes: Sizes, peak: float | None) -> Measurements:
    """The layer and the step without one thing each."""
    without = {name: row_kernels(f"-{name}") for name in kernels.NAMES}
    for name, context in (without | {"varlen attention": padded_attention()}).items():
        with context:
            yield (
                f"without {name}",
                [
                    asdict(measured(work, sizes, peak))
                    for work in torch_works(sizes)
                    if work.name in ("layer", "training step")
                ],
            )


def head(sizes: Sizes, peak: float | None) -> Measurements:
    """The row of the head by its budget in GiB."""
    from megatron_gspo.models import family_of

    _, shape = family_of(gpu.model_config(sizes))
    for budget in BUDGETS_GIB:
        work = gpu.head(sizes, shape, _device(), int(budget * GIB))
        yield f"{budget:g}", asdict(measured(work, sizes, peak))


def profile(sizes: Sizes, peak: float | None) -> Measurements:
    """Of each row every kernel: name, launches, milliseconds; the longest first."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
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
        yield work.name, sorted(entries, key=lambda entry: -entry["milliseconds"])


@dataclass(frozen=True)
class Section:
    """seconds: after which no further measurement begins."""

    measure: Callable[[Sizes, float | None], Measurements]
    seconds: float


SECTIONS = {
    "ceilings": Section(ceilings, 20),
    "rows": Section(rows, 60),
    "switches": Section(switches, 120),
    "head": Section(head, 60),
    "profile": Section(profile, 60),
}


def probe(
    names: Sequence[str], sizes: Sizes, peak: float | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each section's measurements so far, after each of them. A section that fails or runs out of
    time tells so, and the others go on.
    """
    for name in names:
        began = time.monotonic()
        section: dict[str, Any] = {}
        try:
            for key, value in SECTIONS[name].measure(sizes, peak):
                section |= {key: value, "seconds": time.monotonic() - began}
                yield name, section
                if section["seconds"] > SECTIONS[name].seconds:
                    section["stopped"] = f"after {SECTIONS[name].seconds:g} s"
                    break
        except Exception as error:  # the time on a borrowed GPU is short
            section["failed"] = f"{type(error).__name__}: {error}"
        yield name, section


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
        say(f"{name}: {', '.join(section)}")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
