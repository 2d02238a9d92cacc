"""Convert checkpoints between Hugging Face and Megatron: `megatron-gspo convert to-megatron|to-hf|verify`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_gspo.config import ParallelConfig
from megatron_gspo.config.load import read_file
from megatron_gspo.config.parallel_checks import check_divisibility
from megatron_gspo.errors import InputError, UserError, report
from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import checkpoint_metadata, write_metadata_files
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.parameter_slices import CheckpointChunk
from megatron_gspo.tools.convert.to_hugging_face import to_hugging_face
from megatron_gspo.tools.convert.to_megatron import COMPANIONS, to_megatron
from megatron_gspo.tools.convert.torch_dcp_files import METADATA, DistributedReader
from megatron_gspo.tools.convert.verify import verify, write_checksums
from megatron_gspo.tools.convert.work_units import UNIT_BYTES, Workers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with 0, 2 for an input that can't be converted, or 1 where it failed, with one line."""
    options = _parser().parse_args(arguments)
    try:
        {"to-megatron": _to_megatron, "to-hf": _to_hugging_face, "verify": _verify}[options.command](options)
    except UserError as error:
        raise SystemExit(report(error)) from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gspo convert",
        description="Convert checkpoints between Hugging Face and Megatron, and compare the two.",
        epilog="example: megatron-gspo convert to-megatron /models/Qwen3-30B-A3B OUT --tp 2 --ep 8 --verify",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    text = "processes (default: %(default)s)"
    common.add_argument("--processes", type=_positive, default=os.cpu_count() or 1, help=text)
    text = "MiB that each process works on at a time; it needs about three times as much (default: %(default)s)"
    common.add_argument("--unit-mib", type=_size, default=UNIT_BYTES / 2**20, help=text)
    converts = argparse.ArgumentParser(add_help=False, parents=[common])
    converts.add_argument("--dtype", choices=DTYPES, help="type of the result (default: the source's)")
    converts.add_argument("--verify", action="store_true", help="compare both, bit for bit, and write SHA256SUMS")
    there = commands.add_parser("to-megatron", parents=[converts], help="Hugging Face -> Megatron")
    there.add_argument("source", type=Path, help="Hugging Face directory")
    there.add_argument("out", type=Path)
    for flag, name in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert-tensor")):
        text = f"{name}-parallel size to store it for; any other can load it too"
        there.add_argument(f"--{flag}", type=_positive, default=1, help=text)
    back = commands.add_parser("to-hf", parents=[converts], help="Megatron -> Hugging Face")
    checkpoint = "distributed checkpoint, or a training run's directory (its newest)"
    back.add_argument("checkpoint", type=Path, help=checkpoint)
    back.add_argument("out", type=Path)
    back.add_argument("--source", type=Path, help="Hugging Face directory with config, tokenizer, division into files")
    back.add_argument("--max-shard-gib", type=_size, default=4.0, help="largest file, where the source has no index")
    check = commands.add_parser("verify", parents=[common], help="compare a Hugging Face and a Megatron checkpoint")
    check.add_argument("hugging_face", type=Path)
    check.add_argument("checkpoint", type=Path, help=checkpoint)
    text = "also compare both models' log-probs of this text, in float32: takes the memory of the whole model"
    check.add_argument("--probe", metavar="TEXT", help=text)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _to_megatron(options: argparse.Namespace) -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.etp,
    )
    config = read_config(options.source)
    family, shape = family_of(config)
    check_divisibility(parallel, config)
    frame = checkpoint_metadata(family, shape, parallel)
    with _progress("to Megatron") as report:
        out = to_megatron(
            options.source, options.out, frame.chunks, frame.objects, write_metadata_files,
            dtype=DTYPES.get(options.dtype), workers=_workers(options, report),
        )
    if options.verify:
        _prove(options.source, out, chunks_of(options.source), options, made=out)
    print(out)


def _to_hugging_face(options: argparse.Namespace) -> None:
    checkpoint = find_checkpoint(options.checkpoint)
    source = options.source or find_source(options.checkpoint, checkpoint)
    chunks = chunks_of(source)
    with _progress("to Hugging Face") as report:
        out = to_hugging_face(
            checkpoint, options.out, chunks, source, dtype=DTYPES.get(options.dtype),
            max_shard_bytes=int(options.max_shard_gib * 2**30), workers=_workers(options, report),
        )
    if options.verify:
        _prove(out, checkpoint, chunks, options, made=out)
    print(out)


def _workers(options: argparse.Namespace, report: Callable[[int, int], None]) -> Workers:
    return Workers(options.processes, int(options.unit_mib * 2**20), report)


def _verify(options: argparse.Namespace) -> None:
    checkpoint = find_checkpoint(options.checkpoint)
    _prove(options.hugging_face, checkpoint, chunks_of(options.hugging_face), options, made=None)
    if options.probe is not None:
        from megatron_gspo.mcore.model_parity import (
            compare_log_probs,  # loads Transformers, which the rest does without
        )

        difference, tokens = compare_log_probs(options.hugging_face, checkpoint, options.probe)
        print(f"log-probs of {tokens} tokens differ by at most {difference:.1e}", file=sys.stderr)


def chunks_of(hugging_face: Path) -> tuple[CheckpointChunk, ...]:
    """What Megatron's checkpoint of this model holds, each parameter whole."""
    return checkpoint_metadata(*family_of(read_config(hugging_face)), ParallelConfig()).chunks


def _prove(
    hugging_face: Path,
    megatron: Path,
    chunks: Sequence[CheckpointChunk],
    options: argparse.Namespace,
    *,
    made: Path | None,
) -> None:
    """Compare the two in the type of the one that was made (None: of the Hugging Face one), and write its checksums."""
    if made == megatron:
        dtype = DistributedReader(megatron).dtype(chunks[0].key)
    else:
        with CheckpointReader(hugging_face) as reader:
            dtype = reader.common_dtype()
    with _progress("comparing") as report:
        count = verify(hugging_face, megatron, chunks, dtype=dtype, workers=_workers(options, report))
    print(f"{count} tensors are equal, bit for bit", file=sys.stderr)
    if made is not None:
        print(f"checksums: {write_checksums(made)}", file=sys.stderr)


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a distributed checkpoint, else the newest whole one of the run there."""
    if (path / METADATA).is_file():
        return path
    newest, faults = newest_checkpoint(path / "checkpoints")
    if newest is None:
        why = f" ({faults[0]})" if faults else ""
        raise InputError(f"{path} is no distributed checkpoint and no run with a whole one{why}; give one of the two")
    return newest


def find_source(path: Path, checkpoint: Path) -> Path:
    """The Hugging Face directory of a checkpoint's model: its own copy of the config, or what the run began with."""
    if (checkpoint / COMPANIONS / "config.json").is_file():
        return checkpoint / COMPANIONS
    run = path if (path / "config.yaml").is_file() else checkpoint.parent.parent
    if (run / "config.yaml").is_file():
        source = Path(str(read_file(run / "config.yaml").get("model", {}).get("path")))
        if (source / "config.json").is_file():
            return source
        raise InputError(f"{run / 'config.yaml'}: model.path={source} is gone; name its place: --source DIR")
    raise InputError(f"{checkpoint} doesn't say of which model it is; name its Hugging Face directory: --source DIR")


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A bar with bytes, speed and time left, on stderr; a function (bytes done, in all) that moves it.

    It appears with the first bytes: its thread may not run yet when processes are forked.
    """
    columns = (
        TextColumn("{task.description}"), BarColumn(30), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(file=sys.stderr))

    def report(done: int, total: int) -> None:
        task = bar.tasks[0].id if bar.tasks else bar.add_task(title, total=total)
        bar.start()
        bar.update(task, completed=done)

    try:
        yield report
    finally:
        if bar.tasks:  # else it never began, and would print an empty line
            bar.stop()


if __name__ == "__main__":
    main()
