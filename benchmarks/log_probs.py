"""Log-probs, and log-probs with entropy, from hidden states: time and peak memory against the
peers' functions.

Vocabularies of 16k and 152k words, tensor parallelism (TP) over 1, 2 and 4 processes, with gradient
and without. The width is 128, where exponentials and memory count as much as products, and in two
cases 2048, where only products do; in the second ours has memory to keep the logits. The loss is
the mean log-prob and a tenth of the mean entropy.

A *peer* counts where its results and gradients agree with ours to 1e-5 of the largest entry
(gradients in bfloat16 to a rounding, 2^-8). Memory is the peak above the inputs in units of one
float32 [tokens, vocabulary] tensor (of a rank: vocabulary / TP), as the allocator recorded it,
gradients of the hidden states and of the weight included; at width 2048 the weight's gradient alone
is 8 units for everyone, so that row has the peak without the gradients.

    OMP_NUM_THREADS=1 python benchmarks/log_probs.py
    OMP_NUM_THREADS=1 python benchmarks/log_probs.py --centred-by 32  # only ours, at width 2048,
                                      # with the log-probs of score centering and without, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import (
    ROOT,
    Row,
    Seconds,
    Spread,
    by_turns,
    count_row,
    ratios,
    save_rows,
    say,
    table,
    time_row,
    timed,
    versions_in,
)
from benchmarks.log_prob_worker import Case
from benchmarks.peers.environment import peers_python

SAME = 1e-5  # relative to the largest entry
SMALL = 16_384
LARGE = 151_936
KEPT_BYTES = 2**30  # room for all logits of the widest case
PACKAGES = ("trl", "verl", "liger-kernel", "areal")
# The fastest of each kind of call.
WITH_ENTROPY = ("AReaL gather_logprobs", "verl vocab_parallel")
WITHOUT = ("Megatron cross entropy", "Liger chunked log-probs")

Report = Mapping[str, Any]  # what the worker prints for a case


def cases(quick: bool) -> list[Case]:
    """The grid; ``quick``: the small vocabulary with entropy, and TP 2."""
    small = Case(1024, SMALL, 128, peers=WITH_ENTROPY)
    if quick:
        return [small, replace(small, gradient=False), replace(small, tensor_parallel=2)]
    large = replace(small, vocabulary=LARGE)
    plain = replace(large, entropy=False, peers=WITHOUT)
    wide = replace(large, tokens=256, width=2048, repeats=2)
    grid = [
        small,
        large,
        plain,
        replace(large, gradient=False),
        replace(plain, gradient=False),
        wide,
        replace(wide, logit_bytes=KEPT_BYTES),
    ]
    grid += [replace(case, tensor_parallel=ranks) for ranks in (2, 4) for case in (large, plain)]
    return grid


def run_group(python: str, group: Sequence[Case]) -> list[Report]:
    """Run cases of one tensor-parallel size, a process a rank.

    Raises ``RuntimeError`` where a rank fails.
    """
    ranks = group[0].tensor_parallel
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps([asdict(case) for case in group]))
        command = [
            python,
            str(ROOT / "benchmarks" / "log_prob_worker.py"),
            str(file),
            "--ranks",
            str(ranks),
            "--meet",
            str(Path(folder) / "meet"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        errors = Path(folder) / "errors"  # torch's profiler writes there as well
        with errors.open("w") as stderr:
            started = [
                subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    cwd=ROOT,
                    env=env,
                    text=True,
                    stderr=stderr,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                )
                for rank in range(ranks)
            ]
        reports = []
        for line in started[0].stdout or ():
            if line.startswith("@@ "):
                reports.append(json.loads(line[3:]))
                say(name_of(group[len(reports) - 1]))
        if any(process.wait() for process in started):
            raise RuntimeError(f"a rank of {ranks} failed: {errors.read_text()[-2000:]}")
    return reports


def name_of(case: Case) -> str:
    """The description of a case in its rows."""
    parts = [
        "log-prob + entropy" if case.entropy else "log-prob",
        "gradient" if case.gradient else "no gradient",
        f"{case.tokens / 1024:g}k x {round(case.vocabulary / 1000)}k",
    ]
    parts += [case.dtype] if case.dtype != "float32" else []
    parts += [f"TP {case.tensor_parallel}"] if case.tensor_parallel > 1 else []
    parts += [f"hidden {case.width}"] if case.width != 128 else []
    parts += ["logits kept"] if case.logit_bytes is not None else []
    return ", ".join(parts)


def rows_of(case: Case, report: Report) -> list[Row]:
    """Time against each timed peer of the same result; peak against the smallest."""
    once = report["once"]
    name = name_of(case)
    same = {peer for peer, result in once.items() if result["difference"] <= SAME}
    turns = {
        peer: [Seconds(*turn) for turn in taken]
        for peer, taken in report["turns"].items()
        if peer in same
    }
    wide = case.width > 1000
    products = "ours computes the logits twice: 4 products instead of 3"
    note = products + ("; at this width they dominate" if wide else "")
    if not case.gradient or case.logit_bytes is not None:
        note = ""
    rows = [
        time_row(
            "log_probs",
            f"{name}: time",
            turns["ours"],
            turns[peer],
            peer_name=peer,
            note=note,
        )
        for peer in turns
        if peer != "ours"
    ]
    figure = "beyond_gradients" if wide else "peak"
    words = "peak without gradients" if wide else "peak"
    peaks = {peer: once[peer][figure] for peer in same if peer != "ours"}
    if peaks:
        smallest = min(peaks, key=lambda peer: peaks[peer])
        rows.append(
            count_row(
                "log_probs",
                f"{name}: {words}",
                once["ours"][figure],
                peaks[smallest],
                unit="units",
                peer_name=smallest,
            )
        )
    return rows


def not_compared(reports: Sequence[Report]) -> dict[str, str]:
    """Peers that can't run, with the reason, and those that compute something else, with how
    far they are off.
    """
    reasons: dict[str, str] = {}
    for report in reports:
        case = Case(**report["case"])
        for peer, reason in report["failed"].items():
            reasons[f"{peer}, TP {case.tensor_parallel}"] = reason
        for peer, once in report["once"].items():
            if once["difference"] > SAME:
                reasons[f"{peer}, {case.dtype} inputs"] = (
                    f"off by {once['difference']:.0e} of the largest entry"
                )
    return reasons


def centred_ratio(count: int) -> Spread:
    """CPU time of the head with score centering by so many ids, over that without, at the sizes of
    Qwen3-30B-A3B."""
    import torch

    from benchmarks.gpu import Sizes, head

    sizes = Sizes({}, sequences=1, prompt=0, response=256)
    shape = SimpleNamespace(hidden_size=2048, vocab_size=LARGE)
    torch.set_num_threads(1)
    works = [head(sizes, shape, torch.device("cpu"), centred_by=ids) for ids in (0, count)]
    turns = by_turns(
        {work.name: partial(timed, work.call) for work in works}, repeats=5, seconds=120.0
    )
    plain, centred = ([turn.cpu for turn in turns[work.name]] for work in works)
    return ratios(centred, plain)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="16k words with entropy only, 3 repeats"
    )
    parser.add_argument(
        "--peers-python", help="interpreter with the peers; without it .venv-peers is made"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--centred-by", type=int, metavar="K", help="only ours, with score centering by K ids"
    )
    args = parser.parse_args()
    if args.centred_by:
        print(f"CPU time with score centering by {args.centred_by} ids over that without:")
        print(asdict(centred_ratio(args.centred_by)))
        return
    python = args.peers_python or peers_python()
    grid = cases(args.quick)
    reports: list[Report] = []
    for ranks in sorted({case.tensor_parallel for case in grid}):
        reports += run_group(python, [case for case in grid if case.tensor_parallel == ranks])
    pairs = list(zip(sorted(grid, key=lambda case: case.tensor_parallel), reports, strict=True))
    rows = [row for case, report in pairs for row in rows_of(case, report)]
    print(table(rows))
    for name, reason in not_compared(reports).items():
        print(f"not compared: {name}: {reason}")
    if args.json:
        save_rows(
            args.json,
            rows,
            peer_versions=versions_in(python, PACKAGES),
            not_compared=not_compared(reports),
            reports=reports,
        )


if __name__ == "__main__":
    main()
