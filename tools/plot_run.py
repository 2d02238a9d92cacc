"""Draw the curves and the time line of one run, or the curves of several on top of each other.

python -m megatron_gspo.tools.plot_run RUN_DIR [RUN_DIR ...] [--output PICTURE.png]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.tracking.plots import draw_curves
from megatron_gspo.tracking.run_directory import read_metrics
from megatron_gspo.tracking.timeline import draw_timeline

PICTURE = "curves.png"  # that a run draws of itself
_LONGEST_NAME = 100  # characters


class PlotError(InputError):
    """Run directories or a picture that can't be used."""

    label = "plot_run"


def picture_of(run_dirs: Sequence[Path], output: Path | None) -> Path:
    """Where the picture goes: of one run into its directory; of several into the working directory,
    named after them.

    Raises PlotError for the picture that a run draws of itself, where it would show other runs.
    """
    runs = [path.resolve() for path in run_dirs]
    if output is None:
        if len(set(runs)) == 1:
            return run_dirs[0] / PICTURE
        output = Path(
            f"curves_{'_'.join(dict.fromkeys(path.name for path in runs))}"[:_LONGEST_NAME] + ".png"
        )
    owner = output.resolve().parent
    if output.name == PICTURE and (owner / "metrics.jsonl").is_file() and {owner} != set(runs):
        raise PlotError(f"--output {output}: is the picture of the run {owner}; name another file")
    return output


def labelled(run_dirs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The records of each run by its label, the path.

    Raises PlotError for a directory that holds none.
    """
    runs = {}
    for path in run_dirs:
        if not (path / "metrics.jsonl").is_file():
            raise PlotError(f"{path}: is not a run directory (no metrics.jsonl); correct the path")
        runs[str(path)] = read_metrics(path)
        for record in runs[str(path)]:
            wrong = [
                name
                for name, value in record.items()
                if not isinstance(value, (int, float, type(None)))
            ]
            if wrong:
                raise PlotError(
                    f"{path}/metrics.jsonl: {wrong[0]} is no number; it is not of a run of this"
                    " program"
                )
    return runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_gspo.tools.plot_run",
        description=(
            "Draw the curves of one run, or of several on top of each other, from their"
            " metrics.jsonl."
        ),
        epilog="example: python -m megatron_gspo.tools.plot_run runs/a runs/b --output both.png",
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--output",
        type=Path,
        help=(
            "PNG to write (default: RUN_DIR/curves.png of one run, curves_A_B.png here of several)"
        ),
    )
    options = parser.parse_args(arguments)
    try:
        output = picture_of(options.run_dirs, options.output)
        print(draw_curves(labelled(options.run_dirs), output))
        if output.name == PICTURE and (output.parent / "timeline.jsonl").exists():
            print(draw_timeline(output.parent))
    except UserError as error:
        return report(error)
    except (ImportError, OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
