"""What is evaluated: a Hugging Face directory, steps of a run, or running servers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gspo.config.server_urls import check_url
from megatron_gspo.errors import InputError
from megatron_gspo.given_names import CHECKPOINTS, is_real_folder
from megatron_gspo.mcore.checkpoint.checkpoint_files import complete_checkpoints
from megatron_gspo.models.model_shape import read_json
from megatron_gspo.tools.convert.commands import chunks_of, find_source
from megatron_gspo.tools.convert.to_hugging_face import to_hugging_face
from megatron_gspo.tools.convert.work_directory import file_stamps
from megatron_gspo.tools.convert.work_units import Workers

EXPORT = "hf"  # of a run's directory: the trained model


@dataclass(frozen=True)
class Target:
    """One set of weights.

    label: name of its results. step: of its run, None for others. folder: Hugging Face directory,
    or the run's checkpoint, which must be converted. source: Hugging Face directory with its config
    and tokenizer: `folder`, or where the checkpoint's are. urls: of servers that hold the weights;
    `folder` is the directory of their model.
    """

    label: str
    folder: Path
    source: Path
    step: int | None = None
    urls: tuple[str, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        """Whether it must be converted."""
        return self.source != self.folder

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these weights from others."""
        return {"folder": str(self.folder.resolve()), "files": file_stamps(self.folder)}


def is_run(target: str) -> bool:
    """Whether it is the directory of a run; published models may have a config.yaml too, beside
    their config.json.
    """
    return (Path(target) / "config.yaml").is_file() and not (Path(target) / "config.json").is_file()


def server_urls(target: str) -> tuple[str, ...]:
    """The URLs of `http://host:port,http://host:port`; empty for a directory. Raises InputError
    for an invalid one.
    """
    if not target.startswith(("http://", "https://")):
        return ()
    try:
        return tuple(check_url(url) for url in target.split(","))
    except ValueError as error:
        raise InputError(f"MODEL: {error}") from None


def default_output(target: str, model_path: str) -> Path:
    """Where results go without ``--output``: into the run, else into a folder that other models do
    not share.

    target: the argument MODEL. model_path: `model.path`, which is the model of servers.
    """
    if is_run(target):
        return Path(target) / "evaluation"
    urls = server_urls(target)
    folder = Path(model_path if urls else target).resolve()
    name = f"{folder.parent.name}_{folder.name}" if folder.name == EXPORT else folder.name
    digest = hashlib.sha256(json.dumps([str(folder), sorted(urls)]).encode()).hexdigest()[:8]
    return Path("runs") / "evaluation" / f"{'served_' if urls else ''}{name}-{digest}"


def find_targets(target: str, model_path: str, steps: str | None) -> list[Target]:
    """The weights to evaluate, in the order of their steps.

    target: the argument MODEL. model_path: `model.path`. steps: of a run, `all` or comma-separated;
    None: its exported model, else its newest checkpoint. Raises InputError if there is none, or for
    a step that is not there.
    """
    if steps is not None and not is_run(target):
        raise InputError(
            f"--steps {steps}: {target} is no run directory (it has no config.yaml); leave"
            " --steps out"
        )
    if urls := server_urls(target):
        return [Target("served", Path(model_path), Path(model_path), urls=urls)]
    if not is_run(target):
        if not (Path(target) / "config.json").is_file():
            raise InputError(
                f"{target}: is no Hugging Face directory, run directory or server; "
                "give a directory with config.json or config.yaml, or http://host:port"
            )
        return [Target(Path(target).absolute().name, Path(target), Path(target))]
    targets = _of_run(Path(target))
    if not targets:
        raise InputError(
            f"{target}: the run has neither an exported model nor a complete checkpoint; "
            "set checkpoint.export_hf or checkpoint.save_interval in its config"
        )
    if steps is None:
        exported = [each for each in targets.values() if not each.is_checkpoint]
        return exported or [targets[max(targets)]]
    chosen = (
        sorted(targets) if steps == "all" else [_number(step, targets) for step in steps.split(",")]
    )
    return [targets[step] for step in sorted(set(chosen))]


def _of_run(run: Path) -> dict[int, Target]:
    """By step: the complete checkpoints, and the exported model in place of the checkpoint of its
    step.

    A run that continues has no summary yet, which tells the step of the exported model: it is then
    that of an earlier end, and counts only where there is no checkpoint.
    """
    targets = {}
    for path in complete_checkpoints(run / "checkpoints"):
        step = CHECKPOINTS.step(path.name)
        assert step is not None
        targets[step] = Target(path.name, path, find_source(run, path), step)
    summary = run / "summary.json"
    if (run / EXPORT / "config.json").is_file() and (summary.is_file() or not targets):
        step = int(read_json(summary)["step"]) if summary.is_file() else 0
        targets[step] = Target(CHECKPOINTS.file_name(step), run / EXPORT, run / EXPORT, step)
    return targets


def _number(text: str, found: dict[int, Target]) -> int:
    if not text.strip().isdecimal() or int(text) not in found:
        known = ", ".join(map(str, sorted(found)))
        raise InputError(
            f"--steps: the run has no step {text.strip()!r}; it has {known} (checkpoint.keep limits"
            " them)"
        )
    return int(text)


@contextmanager
def hugging_face_folder(
    target: Target, scratch: Path, *, processes: int, report: Callable[[int, int], None]
) -> Iterator[Path]:
    """The target as a Hugging Face directory. A checkpoint is converted into `scratch`, and the
    result removed at the end, or at the next start after a kill.

    report: called with the bytes done and the total. Raises the errors of ``to_hugging_face``.
    """
    if not target.is_checkpoint:
        yield target.folder
        return
    workers = Workers(processes, report=report)
    chunks = chunks_of(target.source)
    out = scratch / target.label
    if is_real_folder(out):
        shutil.rmtree(out)
    try:
        yield to_hugging_face(target.folder, out, chunks, target.source, workers=workers)
    finally:
        if is_real_folder(out):
            shutil.rmtree(out)
        # Not empty: an interrupted conversion, which the next start continues.
        with contextlib.suppress(OSError):
            scratch.rmdir()
