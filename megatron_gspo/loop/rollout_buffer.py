"""The scored rollouts of the step after a checkpoint, kept inside it: a run killed in its updates generates once.

Generation is most of a step's cost. The file lies in the checkpoint whose very weights sampled it and goes with it. It
is written whole or not at all, and used only where everything that the samples depend on is as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.loop.assemble import Run
from megatron_gspo.mcore.checkpoint.checkpoint_files import ROLLOUTS
from megatron_gspo.rollout.sample_exchange import decode_samples, encode_samples

_FILE = ROLLOUTS  # a line of JSON, then the samples as they travel between ranks


@dataclass(frozen=True)
class Place:
    """Where the prompts stand. cursor: how many were drawn. pending: indices of those drawn that are not trained on
    yet, in the order in which they were drawn; a resumed run begins with them."""

    cursor: int = 0
    pending: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One scored rollout batch, the same on every rank, and where the prompts stand after it."""

    samples: list[Sample]
    place: Place
    metrics: dict[str, float]


def write_rollout(run: Run, checkpoint: Path, rollout: Rollout) -> None:
    """Keep ``rollout`` in the checkpoint. The writing rank's part; a failure is said and costs nothing else."""
    if not run.is_writer:
        return
    temporary = checkpoint / (_FILE + ".tmp")
    try:
        payload = encode_samples(rollout.samples, range(len(rollout.samples)))
        head = {
            "made with": conditions(run, rollout.samples),
            "cursor": rollout.place.cursor,
            "pending": rollout.place.pending,
            "metrics": rollout.metrics,
            "bytes": len(payload),
            "crc32": zlib.crc32(payload),
        }
        with temporary.open("wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, checkpoint / _FILE)
    except (OSError, TypeError, ValueError) as error:  # no space, or metadata that JSON can't hold
        temporary.unlink(missing_ok=True)
        print(f"rollouts not kept in {checkpoint}: {type(error).__name__}: {error}", file=sys.stderr)


def read_rollout(run: Run, checkpoint: Path) -> Rollout | None:
    """The rollouts kept in the checkpoint, on every rank; None where there are none that this run would make too.

    The writing rank decides for all and says what it found.
    """
    found: list[Any] = [None]
    if run.is_writer:
        rollout, fault = _read(run, checkpoint / _FILE)
        found = [rollout is not None]
        if rollout or fault:
            what = f"not used: {fault}" if fault else "used; they are not generated again"
            print(f"rollouts kept in {checkpoint}: {what}", file=sys.stderr)
    dist.broadcast_object_list(found, src=0)
    if not found[0]:
        return None
    return rollout if run.is_writer else _read(run, checkpoint / _FILE)[0]


def _read(run: Run, file: Path) -> tuple[Rollout | None, str]:
    """The rollouts of a file, or why they are of no use; neither where there is no file."""
    if not file.is_file():
        return None, ""
    try:
        first, _, payload = file.read_bytes().partition(b"\n")
        head = json.loads(first)
        if len(payload) != head["bytes"] or zlib.crc32(payload) != head["crc32"]:
            return None, "the file is damaged"
        pairs = decode_samples(np.frombuffer(bytearray(payload), dtype=np.uint8))
        place = Place(int(head["cursor"]), tuple(map(int, head["pending"])))
        rollout = Rollout([sample for _, sample in pairs], place, dict(head["metrics"]))
        now = conditions(run, rollout.samples)
        changed = next((key for key, value in now.items() if head["made with"].get(key) != value), None)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return None, f"the file is damaged ({type(error).__name__})"
    return (None, f"{changed} has changed") if changed else (rollout, "")


def conditions(run: Run, samples: Sequence[Sample]) -> dict[str, Any]:
    """All that scored rollouts depend on besides the weights, as plain JSON values by config key."""
    config = run.config.dump()
    found = {"seed": config["seed"], "engine": f"{type(run.engine).__module__}.{type(run.engine).__qualname__}"}
    for section in ("data", "rollout"):
        found |= {f"{section}.{key}": value for key, value in config[section].items()}
    for section, keys in (
        ("model", ("path", "dtype", "init")),
        ("algorithm", ("name", "dynamic_sampling", "max_num_gen_batches")),
    ):
        found |= {f"{section}.{key}": config[section][key] for key in keys}
    found["the engine's routes"] = run.config.routing.needs_rollout_routes
    found["the verifier's file"] = _digest_of_file(run.config.data.resolved_verifier)
    found["the environment's file"] = _digest_of_file(run.config.rollout.environment or "")
    drawn = sorted({sample.prompt_index for sample in samples})
    found["the set of prompts"] = _digest(run.source.prompts, drawn)
    return json.loads(json.dumps(found, default=str))


def _digest(prompts: Sequence[Prompt], drawn: Sequence[int]) -> str:
    total = hashlib.sha256()
    for prompt in (prompts[i] for i in drawn if i < len(prompts)):
        total.update(prompt.token_ids.tobytes())
        total.update(json.dumps([prompt.index, prompt.text, prompt.answer, prompt.metadata], default=str).encode())
    return total.hexdigest()


def _digest_of_file(verifier: str) -> str | None:
    file = Path(verifier.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" and file.is_file() else None
