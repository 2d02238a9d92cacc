"""Rank the parallel layouts of a model on a cluster, and rehearse the best, without a GPU.

megatron-gspo plan --model DIR --gpus N --gpu NAME --response-length L
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_gspo.config import load_config
from megatron_gspo.config.lora_checks import check_targets
from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.gpus import GIB, GPUS, find_gpu
from megatron_gspo.models import family_of, read_config
from megatron_gspo.paths import path_text_argument
from megatron_gspo.tools.one_line_parser import OneLineParser
from megatron_gspo.tools.plan import plan_report, rehearsals
from megatron_gspo.tools.plan.estimate import Estimator, Hardware
from megatron_gspo.tools.plan.layout_search import is_size, search
from megatron_gspo.tools.plan.layouts import name_of, parse_layout
from megatron_gspo.tools.rehearse.op_times import LINK_EFFICIENCY

REHEARSED = 3  # layouts
ABOUT = f"""Rank the parallel layouts of a model on a cluster by a few formulas, and rehearse the {REHEARSED} best: the
real training step on this machine's CPU, with its memory and time (docs/rehearse.md). A rehearsed rank takes
one to three minutes of a core for 30B-A3B; --coarse leaves them out and takes seconds."""
EXAMPLE = """example: megatron-gspo plan --model examples/qwen3_moe/models/Qwen3-30B-A3B --gpus 32 --gpu h100 \\
    --response-length 8192 routing.replay=r3"""


def parser() -> argparse.ArgumentParser:
    """Every option with its default."""
    made = OneLineParser(
        prog="megatron-gspo plan",
        description=ABOUT,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "overrides", nargs="*", metavar="key=value", help="config keys, such as lora.rank=8"
    )
    made.add_argument(
        "--model",
        type=path_text_argument,
        required=True,
        help="Hugging Face model directory, or its config.json",
    )
    made.add_argument("--gpus", type=int, default=8, help="training GPUs (default: %(default)s)")
    made.add_argument(
        "--gpu", default="h100", help=f"one of {', '.join(GPUS)} (default: %(default)s)"
    )
    made.add_argument(
        "--response-length", type=int, required=True, help="longest response in tokens"
    )
    made.add_argument(
        "--prompt-length", type=int, default=1024, help="longest prompt (default: %(default)s)"
    )
    made.add_argument(
        "--global-batch-size",
        type=int,
        default=256,
        help="sequences per optimizer step (default: %(default)s)",
    )
    made.add_argument("--layout", help="this layout only, such as 'TP4 EP8'")
    made.add_argument(
        "--coarse", action="store_true", help="rehearse nothing: formulas only, in seconds"
    )
    made.add_argument("--top", type=int, default=10, help="layouts to show (default: %(default)s)")
    made.add_argument(
        "--reserve",
        type=float,
        default=6.0,
        metavar="GIB",
        help=(
            "memory of a GPU to leave free: CUDA and NCCL take about 3, a paused colocated server 2"
            " (default: %(default)s)"
        ),
    )
    made.add_argument(
        "--efficiency",
        type=float,
        default=0.22,
        help=(
            "share of a GPU's peak that the formulas take as reached (default: %(default)s, as"
            " measured on an H100, docs/gpu.md)"
        ),
    )
    made.add_argument(
        "--link-efficiency",
        type=float,
        default=LINK_EFFICIENCY,
        help="share of the bandwidth of NVLink and network that is reached (default: %(default)s)",
    )
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ``InputError`` for a value that no plan has."""
    for name in ("response_length", "prompt_length", "global_batch_size", "top"):
        if (value := getattr(args, name)) < 1:
            raise InputError(
                f"--{name.replace('_', '-')} {value}: must be at least 1; give an integer above 0"
            )
    for name in ("efficiency", "link_efficiency"):
        if not 0 < (share := getattr(args, name)) <= 1:
            raise InputError(
                f"--{name.replace('_', '-')} {share:g}: is not a share; give a number above 0, at"
                " most 1"
            )
    if not 0 <= args.reserve < math.inf:
        raise InputError(
            f"--reserve {args.reserve:g}: must be finite and at least 0; give GiB, such as 6"
        )
    node = find_gpu(args.gpu).node
    if args.gpus < 1 or (args.gpus > node and args.gpus % node):
        fix = max(args.gpus - args.gpus % node, 1)
        raise InputError(
            f"--gpus {args.gpus}: nodes have {node} GPUs; give 1 to {node} or a multiple, as {fix}"
        )
    for override in args.overrides:
        section, _, field = override.partition("=")[0].partition(".")
        if "=" not in override:
            raise InputError(f"{override}: is not an option; give config keys as key=value")
        if section == "parallel" and is_size(field):
            raise InputError(
                f"{override}: the plan chooses it; name a layout with --layout, as 'TP2 EP8'"
            )


def model_directory(path: str) -> Path:
    """The directory of a model that is named by it or by its config.json. Raises ``InputError``."""
    given = Path(path)
    if not given.exists():
        raise InputError(
            f"--model {path}: no such file; give a Hugging Face model directory or its config.json"
        )
    return given.resolve().parent if given.is_file() else given.resolve()


def write_config(args: argparse.Namespace, folder: Path) -> Path:
    """The config of a run of the options, without a layout.

    Rehearsals read no weights, prompts or servers.
    """
    batch = args.global_batch_size
    samples = next((count for count in (8, 4, 2) if batch % count == 0), batch)
    config = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model_directory(args.model)), "dtype": "bfloat16"},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "verifier": "exact_match",
            "max_prompt_length": args.prompt_length,
        },
        "rollout": {
            "engine": "sglang",
            "rollout_batch_size": batch // samples,
            "n_samples_per_prompt": samples,
            "max_response_length": args.response_length,
        },
        "sglang": {"urls": ["http://localhost:30000"]},
        "training": {
            "steps": 1,
            "global_batch_size": batch,
            "max_tokens_per_micro_batch": 8 * (args.prompt_length + args.response_length),
        },
    }
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def plan(args: argparse.Namespace, folder: Path) -> str:
    """The plan as text. Raises ``UserError``."""
    check_arguments(args)
    file = write_config(args, folder)
    config = load_config(file, args.overrides)
    hf = read_config(config.model.path)
    shape = family_of(hf)[1]
    check_targets(config.lora, hf)
    if (longest := args.prompt_length + args.response_length) > shape.max_position_embeddings:
        raise InputError(
            f"--response-length {args.response_length}: with --prompt-length it makes {longest}"
            f" tokens and the model has {shape.max_position_embeddings} positions; keep the sum"
            " within them"
        )
    hardware = Hardware(find_gpu(args.gpu), args.gpus, args.efficiency, args.link_efficiency)
    room = hardware.gpu.memory - args.reserve * GIB
    estimator = Estimator(shape, config, hardware)
    layout = None if args.layout is None else parse_layout(args.layout, hf, args.gpus)
    ranked = search(
        estimator, room, layout, {override.partition("=")[0] for override in args.overrides}
    )
    rehearsed = []
    if not args.coarse:
        best = ranked.estimates[:REHEARSED]
        rehearsed = rehearsals.rehearse_layouts(file, args.overrides, config, hardware, best)
    chosen = next((each.estimate for each in rehearsed if each.fits(room)), None)
    if args.coarse:
        chosen = ranked.estimates[0]
    parts = [
        plan_report.describe(estimator, room),
        (
            f"{ranked.fit} of {ranked.considered} layouts fit by the formulas; the fastest, "
            "each with its fastest VP and ETP:"
        ),
        plan_report.ranking(ranked, args.top),
        plan_report.rehearsed_table(rehearsed, room) if rehearsed else "",
        plan_report.assumed(hardware),
    ]
    if chosen is None:
        parts.append("No rehearsed layout fits: raise --reserve, or name one with --layout.")
    else:
        keys = "\n".join(
            f"    {override}" for override in rehearsals.layout_overrides(chosen.choice)
        )
        parts.append(f"Config keys of {name_of(chosen.choice.parallel)}:\n\n{keys}")
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; 0, or 2 with one line on standard error."""
    try:
        args = parser().parse_intermixed_args(arguments)
        with tempfile.TemporaryDirectory(prefix="plan_") as folder:
            print(plan(args, Path(folder)))
    except UserError as error:
        return report(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
