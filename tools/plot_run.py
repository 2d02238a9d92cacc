"""Draw the curves of one run, or of several on top of each other.

python -m megatron_gspo.tools.plot_run RUN_DIR [RUN_DIR ...] [--output PICTURE.png]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_gspo.tracking.plots import draw_curves
from megatron_gspo.tracking.run_directory import read_metrics


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a run's curves from its metrics.jsonl.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, help="PNG to write; RUN_DIR/curves.png of the first run by default")
    options = parser.parse_args(arguments)
    try:
        runs = {str(path): read_metrics(path) for path in options.run_dirs}
        print(draw_curves(runs, options.output or options.run_dirs[0] / "curves.png"))
    except (ImportError, OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
