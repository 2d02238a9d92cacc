"""In place of ``one_rank``: writes a record made by hand, or fails, selected by the config's
name.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from megatron_gspo.tools.rehearse.records import write_record
from tests.tools.rehearse.handmade import record


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    options = {"world": int, "rank": int, "imbalance": float, "layers": int, "output": Path}
    for name, kind in options.items():
        parser.add_argument(f"--{name}", type=kind)
    args = parser.parse_args()
    if args.config == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if args.config == "invalid":
        print("config error: model.path: is no directory; give another", file=sys.stderr)
        return 2
    if args.config == "broken" and args.rank == 1:
        print("a warning", file=sys.stderr)
        raise RuntimeError("no kernel for aten.fft")
    notes = (
        *args.overrides,
        f"{args.layers} layers",
        f"imbalance {args.imbalance}",
        os.environ["OMP_NUM_THREADS"],
    )
    write_record(record(args.rank, world=args.world, notes=notes), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
