"""Convert checkpoints: `megatron-gspo convert to-megatron|to-hf|to-peft|merge|quantize|verify`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron_gspo.errors import UserError, report
from megatron_gspo.paths import path_argument
from megatron_gspo.tools.convert.work_units import UNIT_BYTES

DTYPES = ("float32", "bfloat16", "float16")  # names of torch's
FORMATS = ("fp8_block", "fp8_tensor", "int8")  # rollout.quantization.format's


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with 0, with 2 for an invalid input, or with 1 if it fails;
    errors are one line.
    """
    options = _parser().parse_args(arguments)
    # imported here because Megatron takes seconds, and --help and wrong arguments don't need it
    from megatron_gspo.tools.convert import commands

    actions = {
        "to-megatron": commands.run_to_megatron,
        "to-hf": commands.run_to_hugging_face,
        "to-peft": commands.run_to_peft,
        "merge": commands.run_merge,
        "verify": commands.run_verify,
        "quantize": commands.run_quantize,
    }
    try:
        actions[options.command](options)
    except UserError as error:
        raise SystemExit(report(error)) from None
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo convert",
        description=(
            "Convert checkpoints between Hugging Face, PEFT and Megatron, and compare them."
        ),
        epilog=(
            "example: megatron-gspo convert to-megatron /models/Qwen3-30B-A3B OUT --tp 2 --ep 8"
            " --verify"
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    text = "processes (default: %(default)s)"
    common.add_argument("--processes", type=_positive, default=os.cpu_count() or 1, help=text)
    text = (
        "MiB that each process works on at a time; it needs about three times as much (default:"
        " %(default)s)"
    )
    common.add_argument("--unit-mib", type=_size, default=UNIT_BYTES / 2**20, help=text)
    converts = argparse.ArgumentParser(add_help=False, parents=[common])
    converts.add_argument(
        "--dtype", choices=DTYPES, help="type of the result (default: the source's)"
    )
    converts.add_argument(
        "--verify", action="store_true", help="compare both, bit for bit, and write SHA256SUMS"
    )
    there = commands.add_parser("to-megatron", parents=[converts], help="Hugging Face -> Megatron")
    there.add_argument("source", type=path_argument, help="Hugging Face directory")
    there.add_argument("out", type=path_argument)
    for flag, name in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("ep", "expert"),
        ("etp", "expert-tensor"),
    ):
        text = f"{name}-parallel size of the stored layout; a run with any other can load it"
        there.add_argument(f"--{flag}", type=_positive, default=1, help=text)
    back = commands.add_parser("to-hf", parents=[converts], help="Megatron -> Hugging Face")
    checkpoint = "distributed checkpoint, or a run directory (its newest checkpoint)"
    back.add_argument("checkpoint", type=path_argument, help=checkpoint)
    back.add_argument("out", type=path_argument)
    back.add_argument(
        "--source",
        type=path_argument,
        help="Hugging Face directory with config, tokenizer and index",
    )
    back.add_argument(
        "--max-shard-gib", type=_size, default=4.0, help="largest file, if the source has no index"
    )
    text = "Hugging Face directory of the adapters' base (default: the run's model.path)"
    peft = commands.add_parser("to-peft", help="Megatron checkpoint of adapters -> PEFT")
    peft.add_argument("checkpoint", type=path_argument, help=checkpoint)
    peft.add_argument("out", type=path_argument)
    peft.add_argument("--source", type=path_argument, help=text)
    peft.add_argument(
        "--by-expert",
        action="store_true",
        help="experts one by one, for servers (default: fused, for Transformers)",
    )
    peft.add_argument("--verify", action="store_true", help="compare both, bit for bit")
    merge = commands.add_parser("merge", help="adapters and their base -> Hugging Face")
    merge.add_argument(
        "adapters", type=path_argument, help=f"PEFT directory, or of adapters a {checkpoint}"
    )
    merge.add_argument("out", type=path_argument)
    merge.add_argument("--source", type=path_argument, help=text)
    merge.add_argument("--dtype", choices=DTYPES, help="type of the result (default: the base's)")
    check = commands.add_parser(
        "verify", parents=[common], help="compare a Hugging Face and a Megatron checkpoint"
    )
    check.add_argument("hugging_face", type=path_argument)
    check.add_argument("checkpoint", type=path_argument, help=checkpoint)
    text = (
        "also compare both models' log-probs of this text, in float32: takes the memory of the"
        " whole model"
    )
    check.add_argument("--probe", metavar="TEXT", help=text)
    _add_quantize(commands)
    return parser


def _add_quantize(commands: Any) -> None:
    quantize = commands.add_parser("quantize", help="Hugging Face -> Hugging Face in eight bits")
    quantize.add_argument("source", type=path_argument, help="Hugging Face directory")
    quantize.add_argument("out", type=path_argument)
    quantize.add_argument(
        "--format", choices=tuple(FORMATS), required=True, help="as rollout.quantization.format"
    )
    for name, text in (("modules", "are quantised"), ("exclude", "are not")):
        text = f"linear modules that {text}; * is one whole component"
        quantize.add_argument(f"--{name}", nargs="+", default=[], metavar="NAME", help=text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return int(text)


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    main()
