"""A run directory that was used before: what a run that continues changes, and what it must not
change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.config import Config, ConfigError
from megatron_gspo.config.load import flat, read_file
from megatron_gspo.mcore.checkpoint.checkpoint_files import CheckpointError
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.megatron_folders import iteration_folder
from megatron_gspo.models.model_shape import ModelError
from megatron_gspo.tracking.run_directory import FILES_OF_A_RUN

WEIGHTS = "weights"  # in config.yaml's environment: the digest of what the run began with
_SAMPLES, _SAMPLE_BYTES = 7, 4096  # of a file of weights, which can be too large to be read whole
_SHOWN = 200  # characters of a value: paths that differ at their ends must differ here too


def weights_digest(config: Config) -> str:
    """Tells the initial weights from others of the same sizes, by samples of each file.

    "" for random weights, and for ones that can't be read.
    """
    if config.model.init == "random":
        return ""
    digest = hashlib.sha256()
    try:
        if config.model.megatron_path is not None:
            files = sorted(iteration_folder(config.model.megatron_path).glob("*.distcp"))
        else:
            with CheckpointReader(config.model.path) as reader:
                files = reader.files
        for file in files:
            size = file.stat().st_size
            digest.update(str(size).encode())
            with file.open("rb") as stream:
                for sample in range(1, _SAMPLES + 1):
                    stream.seek(size * sample // (_SAMPLES + 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    except (ModelError, OSError):
        return ""
    return digest.hexdigest()[:16]


def continued_settings(config: Config) -> str:
    """What has changed since the last start of a run that continues, in one line; "" for nothing.

    Raises ``CheckpointError`` where the run began with another model: its checkpoints hold that
    model's weights.
    """
    file = Path(config.run_dir) / "config.yaml"
    if not file.is_file():
        return ""
    try:
        before = read_file(file)
    except ConfigError as error:
        return f"{error}: what has changed since then is not known"
    environment = before.pop("environment", None) or {}
    _, path = _initial_weights(before.get("model", {}))
    began_with = environment.get(WEIGHTS)
    now = weights_digest(config)
    if began_with and now and began_with != now:
        raise CheckpointError(_other_model(config, path))
    try:
        before = Config.from_dict(before).dump()
    except ConfigError:  # of another version; what both have can be compared
        pass
    changes = _changes(flat(before), flat(config.dump()))
    if not changes:
        return ""
    return f"{config.run_dir} continues with other settings: {', '.join(changes)}"


def check_no_input_is_moved(config: Config) -> None:
    """Raise ``CheckpointError`` where a new run reads a model that its start would move away
    with an earlier run.
    """
    run_dir = Path(config.run_dir).resolve()
    moved = [run_dir / name for name in FILES_OF_A_RUN]
    teachers = config.distillation.by_name.values()
    inputs = (
        ("model.path", config.model.path),
        ("model.megatron_path", config.model.megatron_path),
        ("critic.path", config.critic.path),
        *((f"{teacher.prefix}.teacher", teacher.teacher) for teacher in teachers),
        ("lora.adapter_path", config.lora.adapter_path),
    )
    for key, path in inputs:
        if path is not None and any(
            Path(path).resolve().is_relative_to(folder) for folder in moved
        ):
            problem = "is what an earlier run left in run_dir, and a new run replaces it"
            raise CheckpointError(f"{key} = {path}: {problem}; choose another run_dir")


def _other_model(config: Config, before: str) -> str:
    """The line of a run that began with another model than the config's."""
    key, now = _initial_weights(config.dump()["model"])
    if Path(now).resolve() == Path(before).resolve():
        problem = f"holds other weights than when the run in {config.run_dir} began"
        return f"{key} = {now}: {problem}; choose another run_dir, or restore them"
    problem = f"the run in {config.run_dir} began with another model, {before}"
    return f"{key} = {now}: {problem}; choose another run_dir, or set {key} back"


def _initial_weights(model: Mapping[str, Any]) -> tuple[str, str]:
    """Key and folder of the initial weights, in the section ``model`` of a config."""
    key = "path" if model.get("megatron_path") is None else "megatron_path"
    return f"model.{key}", str(model.get(key))


def _changes(before: Mapping[str, object], now: Mapping[str, object]) -> Sequence[str]:
    """`key old -> new` of the keys that differ."""
    keys = [key for key in dict.fromkeys([*now, *before]) if key != "run_dir"]
    return [
        f"{key} {_shown(before, key)} -> {_shown(now, key)}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _shown(values: Mapping[str, object], key: str) -> str:
    if key not in values:
        return "unset"
    text = json.dumps(values[key], default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
