"""The scored rollouts of the step after a checkpoint, kept inside it: a run killed in its updates generates only once.

Generation is most of a step's cost. The file is stored in the checkpoint whose weights sampled the rollouts and is
deleted with it. It is written atomically, and used only if everything that the samples depend on is unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.config import Config
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.generation import DataCursor, Rollout
from megatron_gspo.mcore.checkpoint.checkpoint_files import ROLLOUTS
from megatron_gspo.parallel.rank_zero import run_on_rank_zero
from megatron_gspo.rollout.sample_exchange import decode_samples, encode_samples

_FILE = ROLLOUTS  # a line of JSON, then the samples as they are sent between ranks


@dataclass(frozen=True)
class RolloutCache:
    """Reads and writes rollouts in checkpoints. prompts: of the training data. engine_name: of their group source."""

    config: Config
    prompts: Sequence[Prompt]
    engine_name: str

    def read_or_draw(self, checkpoint: Path | None, draw: Callable[[], Rollout]) -> Rollout:
        """The rollouts that are kept in the checkpoint, or those of ``draw``, which are then kept in it.

        checkpoint: of the current weights; None if there is none.
        """
        if checkpoint is None or self.config.algorithm.is_supervised:
            return draw()
        rollout = self.read(checkpoint)
        if rollout is None:
            rollout = draw()
            self.write(checkpoint, rollout)
        return rollout

    def write(self, checkpoint: Path, rollout: Rollout) -> None:
        """Keep ``rollout`` in the checkpoint; rank 0 writes. A failure is reported and has no other effect."""
        if dist.get_rank() != 0:
            return
        temporary = checkpoint / (_FILE + ".tmp")
        try:
            payload = encode_samples(rollout.samples, range(len(rollout.samples)))
            head = {
                "made with": self.conditions(rollout.samples),
                "cursor": rollout.cursor.drawn,
                "pending": rollout.cursor.pending,
                "metrics": rollout.metrics,
                "bytes": len(payload),
                "crc32": zlib.crc32(payload),
            }
            with temporary.open("wb") as file:
                file.write(json.dumps(head).encode() + b"\n" + payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, checkpoint / _FILE)
        except (OSError, TypeError, ValueError) as error:  # no space, or metadata that JSON can't represent
            temporary.unlink(missing_ok=True)
            print(f"rollouts not kept in {checkpoint}: {type(error).__name__}: {error}", file=sys.stderr)

    def read(self, checkpoint: Path) -> Rollout | None:
        """The rollouts kept in the checkpoint, on every rank; None if there are none or this run would draw others.

        Rank 0 decides for all ranks and reports what it found.
        """
        file = checkpoint / _FILE
        found: list[Rollout] = []

        def decide() -> bool:
            rollout, problem = self._read_valid(file)
            if rollout or problem:
                result = f"not used: {problem}" if problem else "used; they are not generated again"
                print(f"rollouts kept in {checkpoint}: {result}", file=sys.stderr)
            found.extend([rollout] if rollout else [])
            return rollout is not None

        if not run_on_rank_zero(decide):
            return None
        return found[0] if found else _decode(file)[1]

    def _read_valid(self, file: Path) -> tuple[Rollout | None, str]:
        """The rollouts of a file, or why they can't be used; neither if there is no file."""
        if not file.is_file():
            return None, ""
        try:
            made_with, rollout = _decode(file)
            now = self.conditions(rollout.samples)
            changed = next((key for key, value in now.items() if made_with.get(key) != value), None)
        except _Damaged as error:
            return None, str(error)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return None, f"the file is damaged ({type(error).__name__})"
        return (None, f"{changed} has changed") if changed else (rollout, "")

    def conditions(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """All that scored rollouts depend on besides the weights, as plain JSON values by config key."""
        config = self.config.dump()
        found = {"seed": config["seed"], "engine": self.engine_name}
        for section in ("data", "rollout"):
            found |= {f"{section}.{key}": value for key, value in config[section].items()}
        for section, keys in (
            ("model", ("path", "dtype", "init")),
            ("algorithm", ("name", "dynamic_sampling", "max_num_gen_batches")),
        ):
            found |= {f"{section}.{key}": config[section][key] for key in keys}
        del found["data.cache_dir"]
        found["the engine's routes"] = self.config.routing.needs_rollout_routes
        found["the verifier's file"] = _digest_of_file(self.config.data.resolved_verifier)
        found["the environment's file"] = _digest_of_file(self.config.rollout.environment or "")
        drawn = sorted({sample.prompt_index for sample in samples})
        found["the set of prompts"] = _digest(self.prompts, drawn)
        return json.loads(json.dumps(found, default=str))


class _Damaged(Exception):
    """A file that was not written by `RolloutCache.write`, or was changed since."""


def _decode(file: Path) -> tuple[dict[str, Any], Rollout]:
    """(conditions, rollouts) of a file. Raises _Damaged, or whatever a damaged file causes."""
    first, _, payload = file.read_bytes().partition(b"\n")
    head = json.loads(first)
    if len(payload) != head["bytes"] or zlib.crc32(payload) != head["crc32"]:
        raise _Damaged("the file is damaged")
    pairs = decode_samples(np.frombuffer(bytearray(payload), dtype=np.uint8))
    cursor = DataCursor(int(head["cursor"]), tuple(map(int, head["pending"])))
    return head["made with"], Rollout([sample for _, sample in pairs], cursor, dict(head["metrics"]))


def _digest(prompts: Sequence[Prompt], drawn: Sequence[int]) -> str:
    total = hashlib.sha256()
    for prompt in (prompts[i] for i in drawn if i < len(prompts)):
        total.update(prompt.token_ids.tobytes())
        total.update(json.dumps([prompt.index, prompt.text, prompt.answer, prompt.metadata], default=str).encode())
    return total.hexdigest()


def _digest_of_file(verifier: str) -> str | None:
    file = Path(verifier.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" and file.is_file() else None
