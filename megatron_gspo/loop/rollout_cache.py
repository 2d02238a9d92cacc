"""The scored rollouts of a step in a file: of the step after a checkpoint, kept inside it, so that a
run killed in its updates generates only once; and of each step, if ``training.batches`` is set.

Generation is most of a step's cost. The file in a checkpoint is of the rollouts that its weights
sampled and is deleted with it. A file is written atomically, by every rank that has samples its own
part, and used only if everything that the samples depend on is unchanged. ``training.only: train``
uses it in any case, so that one batch can be trained on with other settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.data.sample_batch import ROW, SampleBatch
from megatron_gspo.errors import DiskError, RunError, first_line, writing
from megatron_gspo.given_names import BATCHES
from megatron_gspo.loop.generation import DataCursor, Rollout
from megatron_gspo.mcore.checkpoint.checkpoint_files import ROLLOUTS
from megatron_gspo.parallel.host_exchange import gather_rows_of_ranks, sum_over_ranks
from megatron_gspo.parallel.rank_zero import first_failure, run_on_rank_zero
from megatron_gspo.rollout.sample_codec import decode_samples, encode_samples
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

_FILE = ROLLOUTS  # a line of JSON, the table, then a section of each rank: its samples as they are sent between ranks
_PROMPTS = "the set of prompts"
_CHUNK = 64 << 20  # bytes that are encoded at once, about
_SECTION = np.dtype([("bytes", np.int64), ("crc32", np.int64)])


@dataclass(frozen=True)
class RolloutCache:
    """Reads and writes rollouts in checkpoints."""

    config: Config
    prompts: Sequence[Prompt]
    """Prompts of the training data."""

    engine_name: str
    """Name of the group source's engine."""

    def of_step(self, step: int, checkpoint: Path | None, draw: Callable[[], Rollout]) -> Rollout:
        """The rollouts of a step (counted from 0): those in ``training.batches`` for half of the
        loop, else those of `read_or_draw`, which are then written there.

        Raises ``RunError`` where ``training.only: train`` finds none, and ``DiskError`` where
        ``training.only: rollout`` can't write one: the run has no other output.
        """
        training = self.config.training
        if training.batches is None:
            return self.read_or_draw(checkpoint, draw)
        folder = Path(training.batches) / BATCHES.file_name(step + 1)
        rollout = None if training.only is None else self.read(folder)
        if rollout is None and training.only == "train":
            raise RunError(
                f"training.batches = {training.batches}: has no batch of step {step + 1} that can"
                " be used; write it with training.only: rollout, or lower training.steps"
            )
        if rollout is None:
            rollout = self.read_or_draw(checkpoint, draw)
            run_on_rank_zero(lambda: _make(folder))
            if training.only == "rollout":
                self.write(folder, rollout)
            else:
                self._keep(folder, rollout)
        return rollout

    def read_or_draw(self, checkpoint: Path | None, draw: Callable[[], Rollout]) -> Rollout:
        """The rollouts that are kept in the checkpoint, or those of ``draw``, which are then kept
        in it.

        checkpoint: of the current weights; None if there is none.
        """
        if checkpoint is None or self.config.algorithm.is_supervised:
            return draw()
        rollout = self.read(checkpoint)
        if rollout is None:
            rollout = draw()
            self._keep(checkpoint, rollout)
        return rollout

    def _keep(self, folder: Path, rollout: Rollout) -> None:
        """`write`, whose failure is reported and has no other effect."""
        try:
            self.write(folder, rollout)
        except DiskError as error:
            if dist.get_rank() == 0:
                logger.warning(f"rollouts not kept in {folder}: {error}")

    def write(self, folder: Path, rollout: Rollout) -> None:
        """Write ``rollout`` into a folder. Raises ``DiskError`` on every rank if one fails; there is
        no part of a file then. A collective of the batch's group."""
        temporary = folder / (_FILE + ".tmp")
        batch = rollout.batch
        failed = ""
        section = np.zeros(1, dtype=_SECTION)
        try:
            for chunk in _chunks(batch):
                section["bytes"] += len(chunk)
                section["crc32"] = zlib.crc32(chunk, int(section["crc32"][0]))
        except (TypeError, ValueError) as error:
            failed = (
                f"{folder}: cannot be written: the samples cannot be encoded"
                f" ({type(error).__name__}: {first_line(error)}); give them metadata that JSON can"
                " represent"
            )
        sections = np.concatenate(gather_rows_of_ranks(section, batch.group))
        # It alone reads the prompts.
        head = self._head(rollout, sections) if dist.get_rank() == 0 else b""
        [head_bytes] = sum_over_ranks(np.array([len(head)], dtype=np.int64), batch.group).tolist()
        offset = head_bytes + batch.table.nbytes + int(sections["bytes"][: dist.get_rank()].sum())

        def begin() -> None:
            if dist.get_rank() == 0:
                _write(temporary, "wb", 0, [head, batch.table.tobytes()])

        def add_section() -> None:
            if section["bytes"][0]:
                _write(temporary, "r+b", offset, _chunks(batch))

        def finish() -> None:
            if dist.get_rank() == 0:
                os.replace(temporary, folder / _FILE)

        problem = first_failure(failed, batch.group)
        for action in (begin, add_section, finish):
            if problem is None:
                problem = first_failure(_attempt(action, temporary), batch.group)
        if problem is None:
            return
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # not there, or not this run's
                temporary.unlink()
        raise DiskError(problem[1])

    def _head(self, rollout: Rollout, sections: np.ndarray) -> bytes:
        table = rollout.batch.table
        head = {
            "made with": self.conditions(table),
            "cursor": rollout.cursor.drawn,
            "pending": rollout.cursor.pending,
            "metrics": rollout.metrics,
            "rows": [len(table), ROW.itemsize, zlib.crc32(table.tobytes())],
            "parts": [list(map(int, section)) for section in sections],
        }
        return json.dumps(head).encode() + b"\n"

    def read(self, checkpoint: Path) -> Rollout | None:
        """The rollouts kept in the checkpoint, each section on a rank; None if there are none or this
        run would draw others.

        Rank 0 decides for all ranks and reports what it found. A collective of the world.
        """
        file = checkpoint / _FILE
        size = dist.get_world_size()
        rank = dist.get_rank()
        head, problem = run_on_rank_zero(lambda: self._read_head(file))
        samples: dict[int, Sample] = {}
        if head is not None:
            damage = ""
            for number in range(rank, len(head["parts"]), size):
                try:
                    samples |= _read_section(file, head, number)
                except _Damaged as error:
                    damage = str(error)
                except (
                    OSError,
                    ValueError,
                    KeyError,
                    TypeError,
                    IndexError,
                    AttributeError,
                ) as error:
                    damage = f"the file is damaged ({type(error).__name__})"
            failure = first_failure(damage, dist.group.WORLD)
            problem = failure[1] if failure else ""
        if rank == 0 and (head is not None or problem):
            result = f"not used: {problem}" if problem else "used; they are not generated again"
            logger.info(f"rollouts kept in {checkpoint}: {result}")
        if head is None or problem:
            return None
        batch = SampleBatch.gathered(list(samples.values()), list(samples), dist.group.WORLD)
        cursor = DataCursor(int(head["cursor"]), tuple(map(int, head["pending"])))
        return Rollout(batch, cursor, dict(head["metrics"]))

    def _read_head(self, file: Path) -> tuple[dict[str, Any] | None, str]:
        """The first line of a file with its length as ``head``, or why it can't be used; neither if
        there is no file."""
        if not file.is_file():
            return None, ""
        try:
            with file.open("rb") as stream:
                line = stream.readline()
                head = json.loads(line)
                count, width, crc32 = head["rows"]
                table = stream.read(count * width)
            head["start"] = len(line) + len(table)
            if file.stat().st_size != head["start"] + sum(size for size, _ in head["parts"]):
                raise _Damaged("the file is damaged")
            if width != ROW.itemsize:
                return None, "samples were encoded by another version"
            if zlib.crc32(table) != crc32:
                raise _Damaged("the file is damaged")
            now = self.conditions(np.frombuffer(table, dtype=ROW))
            if self.config.training.only == "train":
                now = {_PROMPTS: now[_PROMPTS]}
            changed = next(
                (key for key, value in now.items() if head["made with"].get(key) != value), None
            )
        except _Damaged as error:
            return None, str(error)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return None, f"the file is damaged ({type(error).__name__})"
        return (None, f"{changed} has changed") if changed else (head, "")

    def conditions(self, table: np.ndarray) -> dict[str, Any]:
        """All that scored rollouts depend on besides the weights, as plain JSON values by
        config key.
        """
        config = self.config.dump()
        conditions = {"seed": config["seed"], "engine": self.engine_name}
        for section in ("data", "rollout", "agents"):
            conditions |= {f"{section}.{key}": value for key, value in config[section].items()}
        for section, keys in (
            ("model", ("path", "dtype", "init")),
            ("algorithm", ("name", "dynamic_sampling", "max_num_gen_batches", "score_centering")),
            ("routing", ("perturbation", "perturbation_options")),
        ):
            conditions |= {f"{section}.{key}": config[section][key] for key in keys}
        del conditions["data.cache_dir"]
        conditions["the engine's routes"] = self.config.routing.needs_rollout_routes
        for name, data in self.config.data.by_source.items():
            of_source = f" of {name}" if name else ""
            digest = _digest_of_file(data.resolved_verifier)
            conditions[f"the verifier's file{of_source}"] = digest
        conditions["the perturbation's file"] = _digest_of_file(
            self.config.routing.perturbation or ""
        )
        conditions["the environment's file"] = _digest_of_file(
            self.config.rollout.environment or ""
        )
        conditions["the agent's file"] = _digest_of_file(self.config.agents.function or "")
        drawn = np.unique(table["prompt_index"]).tolist()
        conditions[_PROMPTS] = _digest(self.prompts, drawn)
        return json.loads(json.dumps(conditions, default=str))


class _Damaged(Exception):
    """A file that was not written by `RolloutCache.write`, or was changed since."""


def _chunks(batch: SampleBatch) -> Iterator[bytes]:
    """This rank's samples as bytes, each chunk after its length in 8 bytes."""
    positions = list(batch.held)
    while positions:
        taken = 0
        size = 0
        while taken < len(positions) and size < _CHUNK:
            sample = batch.held[positions[taken]]
            arrays = (
                sample.routed_experts,
                sample.rollout_top_ids,
                sample.rollout_top_log_probs,
                sample.support_ids,
            )
            size += 32 * sample.length + sum(a.nbytes for a in arrays if a is not None)
            taken += 1
        encoded = positions[:taken]
        positions = positions[taken:]
        payload = encode_samples([batch.held[i] for i in encoded], encoded)
        yield len(payload).to_bytes(8, "little") + payload


def _read_section(file: Path, head: dict[str, Any], number: int) -> dict[int, Sample]:
    """The samples of a section by position.

    Raises _Damaged, or another error that a damaged file causes.
    """
    size, crc32 = head["parts"][number]
    start = head["start"] + sum(size for size, _ in head["parts"][:number])
    payload = np.fromfile(file, dtype=np.uint8, count=size, offset=start)
    if len(payload) != size or zlib.crc32(payload.data) != crc32:
        raise _Damaged("the file is damaged")
    samples: dict[int, Sample] = {}
    at = 0
    while at < size:
        length = int.from_bytes(payload[at : at + 8].tobytes(), "little")
        samples |= dict(decode_samples(payload[at + 8 : at + 8 + length]))
        at += 8 + length
    return samples


def _write(file: Path, mode: str, offset: int, chunks: Iterator[bytes] | Sequence[bytes]) -> None:
    with file.open(mode) as stream:
        stream.seek(offset)
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())


def _make(folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _attempt(action: Callable[[], None], file: Path) -> str:
    """Why an action that writes the file failed; empty where it didn't."""
    try:
        with writing(file):
            action()
    except DiskError as error:
        return str(error)
    return ""


def _digest(prompts: Sequence[Prompt], drawn: Sequence[int]) -> str:
    total = hashlib.sha256()
    for prompt in (prompts[i] for i in drawn if i < len(prompts)):
        total.update(prompt.token_ids.tobytes())
        total.update(
            json.dumps(
                [prompt.index, prompt.text, prompt.answer, prompt.metadata], default=str
            ).encode()
        )
    return total.hexdigest()


def _digest_of_file(verifier: str) -> str | None:
    file = Path(verifier.rpartition(":")[0])
    return (
        hashlib.sha256(file.read_bytes()).hexdigest()
        if file.suffix == ".py" and file.is_file()
        else None
    )
