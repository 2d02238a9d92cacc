"""The commands of ``megatron-gspo convert``; each takes the parsed arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_gspo.config import ParallelConfig
from megatron_gspo.config.load import read_file
from megatron_gspo.config.parallel_checks import check_divisibility
from megatron_gspo.errors import InputError
from megatron_gspo.mcore.checkpoint.checkpoint_files import newest_checkpoint
from megatron_gspo.mcore.checkpoint.checkpoint_metadata import (
    checkpoint_metadata,
    write_metadata_files,
)
from megatron_gspo.mcore.checkpoint.metadata_file import METADATA
from megatron_gspo.models import family_of, read_config
from megatron_gspo.models.families import names_of_own_type
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.megatron_folders import TRACKER, iteration_folder
from megatron_gspo.models.parameter_slices import CheckpointChunk
from megatron_gspo.models.peft_files import read_adapters
from megatron_gspo.tools.convert import adapters
from megatron_gspo.tools.convert.quantize import quantize_checkpoint
from megatron_gspo.tools.convert.to_hugging_face import to_hugging_face
from megatron_gspo.tools.convert.to_megatron import COMPANIONS, to_megatron
from megatron_gspo.tools.convert.torch_dcp_files import DistributedReader
from megatron_gspo.tools.convert.verify import verify, write_checksums
from megatron_gspo.tools.convert.work_units import Workers


def run_to_megatron(options: argparse.Namespace) -> None:
    """``convert to-megatron``: raises the errors of ``to_megatron`` and ``verify``."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=options.etp,
    )
    config = read_config(options.source)
    family, shape = family_of(config)
    check_divisibility(parallel, config)
    metadata = checkpoint_metadata(family, shape, parallel)
    with _progress("to Megatron") as report:
        out = to_megatron(
            options.source,
            options.out,
            metadata.chunks,
            metadata.objects,
            write_metadata_files,
            dtype=_dtype(options),
            workers=_workers(options, report),
        )
    if options.verify:
        _compare(options.source, out, chunks_of(options.source), options, result=out)
    print(out)


def run_to_hugging_face(options: argparse.Namespace) -> None:
    """``convert to-hf``: raises the errors of ``to_hugging_face`` and ``verify``."""
    checkpoint = find_checkpoint(options.checkpoint)
    if adapters.adapters_of_run(options.checkpoint, checkpoint) is not None:
        raise InputError(f"{checkpoint} holds adapters; use convert merge, or convert to-peft")
    source = options.source or find_source(options.checkpoint, checkpoint)
    chunks = chunks_of(source)
    with _progress("to Hugging Face") as report:
        out = to_hugging_face(
            checkpoint,
            options.out,
            chunks,
            source,
            dtype=_dtype(options),
            max_shard_bytes=int(options.max_shard_gib * 2**30),
            workers=_workers(options, report),
        )
    if options.verify:
        _compare(out, checkpoint, chunks, options, result=out)
    print(out)


def run_quantize(options: argparse.Namespace) -> None:
    """``convert quantize``: raises the errors of ``quantize_checkpoint``."""
    print(
        quantize_checkpoint(
            options.source, options.out, options.format, options.modules, options.exclude
        )
    )


def run_to_peft(options: argparse.Namespace) -> None:
    """``convert to-peft``: raises the errors of ``adapters.py``."""
    trained = _trained_adapters(options.checkpoint, options.source)[0]
    out = adapters.write_peft(trained, options.out, by_expert=options.by_expert)
    if options.verify:
        print(f"{adapters.compare(trained, out)} tensors are equal, bit for bit", file=sys.stderr)
    print(out)


def run_merge(options: argparse.Namespace) -> None:
    """``convert merge``: raises the errors of ``adapters.py``."""
    if (options.adapters / "adapter_config.json").is_file():
        trained = adapters.Adapters(*read_adapters(options.adapters))
        source = options.source or Path(trained.facts.base)
        if not (source / "config.json").is_file():
            raise InputError(
                f"{options.adapters}: their base {source} is not there; pass --source DIR"
            )
    else:
        trained, source = _trained_adapters(options.adapters, options.source)
    print(adapters.merge(trained, source, options.out, dtype=_dtype(options)))


def _trained_adapters(path: Path, source: Path | None) -> tuple[adapters.Adapters, Path]:
    """The adapters of a run or of one of its checkpoints, and their base."""
    checkpoint = find_checkpoint(path)
    lora = adapters.adapters_of_run(path, checkpoint)
    if lora is None:
        raise InputError(
            f"{path}: no run with lora.rank in its config.yaml; give a run directory, or its"
            " checkpoint"
        )
    source = source or find_source(path, checkpoint)
    return adapters.read_megatron(checkpoint, lora, source), source


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return getattr(torch, options.dtype) if options.dtype else None


def _workers(options: argparse.Namespace, report: Callable[[int, int], None]) -> Workers:
    return Workers(options.processes, int(options.unit_mib * 2**20), report)


def run_verify(options: argparse.Namespace) -> None:
    """``convert verify``: raises ``ModelError`` for a difference."""
    checkpoint = find_checkpoint(options.checkpoint)
    _compare(
        options.hugging_face, checkpoint, chunks_of(options.hugging_face), options, result=None
    )
    if options.probe is not None:
        from megatron_gspo.mcore.model_parity import compare_log_probs  # imports Transformers

        difference, tokens = compare_log_probs(options.hugging_face, checkpoint, options.probe)
        print(f"log-probs of {tokens} tokens differ by at most {difference:.1e}", file=sys.stderr)


def chunks_of(hugging_face: Path) -> tuple[CheckpointChunk, ...]:
    """The chunks of this model's Megatron checkpoint, each parameter whole."""
    return checkpoint_metadata(*family_of(read_config(hugging_face)), ParallelConfig()).chunks


def _compare(
    hugging_face: Path,
    megatron: Path,
    chunks: Sequence[CheckpointChunk],
    options: argparse.Namespace,
    *,
    result: Path | None,
) -> None:
    """Compare the two in the type of the converted one (None: of the Hugging Face one), and
    write its checksums.
    """
    if result == megatron:
        dtype = DistributedReader(megatron).dtype(
            next(c.key for c in chunks if not c.part.rule.keeps_float32)
        )
    else:
        with CheckpointReader(hugging_face) as reader:
            dtype = reader.common_dtype(
                names_of_own_type(reader.names, *family_of(read_config(hugging_face)))
            )
    with _progress("comparing") as report:
        count = verify(
            hugging_face, megatron, chunks, dtype=dtype, workers=_workers(options, report)
        )
    print(f"{count} tensors are equal, bit for bit", file=sys.stderr)
    if result is not None:
        print(f"checksums: {write_checksums(result)}", file=sys.stderr)


def find_checkpoint(path: Path) -> Path:
    """``path`` if it is a distributed checkpoint, else the newest one in a folder of
    Megatron-LM's, or the newest complete checkpoint of a run directory.

    Raises ``InputError`` if it is neither.
    """
    if (path / METADATA).is_file() or (path / TRACKER).is_file():
        return iteration_folder(path)
    newest, faults = newest_checkpoint(path / "checkpoints")
    if newest is None:
        why = f" ({faults[0]})" if faults else ""
        raise InputError(
            f"{path} is neither a distributed checkpoint nor a run directory with one{why}; give"
            " either"
        )
    return newest


def find_source(path: Path, checkpoint: Path) -> Path:
    """The Hugging Face directory of a checkpoint's model: its copy of the config, or the run's
    ``model.path``.
    """
    if (checkpoint / COMPANIONS / "config.json").is_file():
        return checkpoint / COMPANIONS
    run = path if (path / "config.yaml").is_file() else checkpoint.parent.parent
    if (run / "config.yaml").is_file():
        source = Path(str(read_file(run / "config.yaml").get("model", {}).get("path")))
        if (source / "config.json").is_file():
            return source
        raise InputError(
            f"{run / 'config.yaml'}: model.path={source} does not exist; pass --source DIR"
        )
    raise InputError(f"{checkpoint} has no copy of its model's config.json; pass --source DIR")


@contextmanager
def _progress(title: str) -> Iterator[Any]:
    """A progress bar on stderr; yields the function (bytes done, total) that updates it.

    It starts with the first update, so that a conversion with nothing left to do shows none.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
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
        if bar.tasks:  # otherwise it was never started, and would print an empty line
            bar.stop()
