"""Figures of `real_size.py` of the code before its data plane, where that code runs: the column "before" of its table.

A response is parsed and checked by the code of that commit; the old samples and packing are not timed. Every rank held
all samples: 8 ranks held 8 times their share. Checkpoints are from a measurement of that code on the same machine: a
model of 40 million parameters in float32 at 1, 2 and 4 data-parallel ranks.

    OMP_NUM_THREADS=1 python benchmarks/real_size_before.py      # writes benchmarks/results/DATE-before.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last: `megatron_gspo` may be the old one

from benchmarks.common import RESULTS, ROOT, hardware, versions
from benchmarks.real_size_figure import memory, reset_peak
from benchmarks.real_size_response import EXPERTS, LAYERS, TOP, VERSION, WORDS, response_body
from benchmarks.result_files import save

COMMIT = "a5bfd81e3d7a3f1633bc0867c6bd19be0ae4edab"
TOKENS = 32_768
_GIB = 2**30
# of the weights (4 bytes) and Adam's moments (8) of 40 million parameters, divided by the ranks
_OWNED = 154 * 2**20 * 3
_SAVED = {1: 1.36 * _GIB, 2: 1.16 * _GIB, 4: 1.04 * _GIB}  # bytes that a rank allocates during a save


def old_response(body: bytes) -> dict[str, float]:
    """A body parsed and checked by the old code: seconds of one core, peak and kept bytes."""
    from megatron_gspo.rollout.sglang.answers import Asked, RouteLayout, is_empty, parse_answer

    routes = RouteLayout(LAYERS, tuple(range(LAYERS)), TOP, EXPERTS)
    asked = Asked("sample 0/0", 1, TOKENS, WORDS, VERSION, frozenset({1}), routes)

    def parsed() -> object:
        answer = json.loads(body)
        assert not is_empty(answer, asked)
        return parse_answer(answer, asked)

    parsed()
    seconds = []
    for _ in range(5):
        began = time.process_time()
        parsed()
        seconds.append(time.process_time() - began)
    gc.collect()
    before = reset_peak()
    parsed()
    peak = memory("VmHWM") - before + len(body)  # the body was there before
    tracemalloc.start()
    part = parsed()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    assert part is not None
    return {"seconds": statistics.median(seconds), "peak": peak / len(body), "kept": kept / (TOKENS * LAYERS * TOP)}


def measured() -> dict[str, float]:
    """`old_response` in a process that imports the old code."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", COMMIT, "megatron_gspo"], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        (Path(folder) / "body").write_bytes(response_body(TOKENS))
        env = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-P", __file__, "--body", str(Path(folder) / "body")]
        return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body", type=Path, help="parse this file with the code that is imported, and print JSON")
    args = parser.parse_args()
    if args.body:
        print(json.dumps(old_response(args.body.read_bytes())))
        return
    machine, found, today = hardware(), measured(), datetime.date.today().isoformat()
    response = f"a response of {TOKENS:,} tokens with routes: "
    rows = [
        {"what": f"{response}checked and packed", "before": found["seconds"], "how": "parsed and checked alone"},
        {"what": f"{response}received and checked, peak", "before": found["peak"], "how": "from the body on"},
        {"what": f"{response}kept", "before": found["kept"], "how": "of the parsed part"},
        {"what": "2,048 responses of 4,096 tokens with routes over 8 ranks: host memory of a rank beyond 200 MiB",
         "before": 8.0, "how": "counted: every rank held all samples"},
        *({"what": f"checkpoint save: host memory beyond the model, ranks with * each: {ranks}",
           "before": held / (_OWNED / ranks), "how": "40 million parameters, data-parallel ranks alone"}
          for ranks, held in _SAVED.items()),
    ]  # fmt: skip
    save(RESULTS / f"{today}-before.json",
         {"date": today, "commit": COMMIT, "hardware": machine, "versions": versions(), "rows": rows})  # fmt: skip


if __name__ == "__main__":
    main()
