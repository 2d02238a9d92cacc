"""The files of a model directory beside its weights: config, tokenizer, chat templates, processors
and their code.

They go into exports unchanged, so that a directory that a stranger made must not name other files
of this machine: a link may lead to a file of the same directory, or of a Hugging Face cache into
the cache's blobs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_gspo.models.config_defaults import HFConfig
from megatron_gspo.models.model_shape import ModelError, read_json
from megatron_gspo.models.stored_formats import QUANTIZATION_KEYS

_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.model",  # of sentencepiece and tiktoken
    "*.tiktoken",
    "tekken.json",
    "*preprocessor_config.json",  # of images and videos
    "processor_config.json",
)
_CODE = "*.py"
# They may have an `auto_map`.
_WITH_CODE = ("config.json", "tokenizer_config.json", "*processor_config.json")


def companions(folder: str | Path) -> list[Path]:
    """The files of a model directory beside its weights, each once; of code those beside a config
    that names some.

    What is no file, such as a folder or a link to nothing, is left out. Raises ``ModelError`` for a
    file that can't be read and for a link that leaves the directory.
    """
    folder = Path(folder)
    within = _allowed(folder)
    patterns = (*_PATTERNS, _CODE) if any(_local_code(folder)) else _PATTERNS
    files = dict.fromkeys(file for pattern in patterns for file in sorted(folder.glob(pattern)))
    return [file for file in files if _is_companion(file, within)]


def copy_companions(
    source: str | Path,
    target: str | Path,
    dtype: torch.dtype | None = None,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Copy the `companions` of one model directory to another, whose config then names ``dtype``,
    which what loads the weights casts them to, and ``quantization`` or none. dtype None: the config
    is unchanged.

    An ``auto_map`` loses the classes whose code the source lacks.
    """
    target = Path(target)
    for file in companions(source):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)  # without its mode: a source may be read-only
    for name in {file.name for pattern in _WITH_CODE for file in target.glob(pattern)}:
        _forget_missing_code(target / name)
    if dtype is None:
        return
    config = read_json(target / "config.json")
    changed = _with_dtype(config, str(dtype).removeprefix("torch."))
    changed = _without_quantization(changed)
    if quantization is not None:
        changed["quantization_config"] = quantization
    if changed != config:
        _write_json(target / "config.json", changed)


def _allowed(folder: Path) -> list[Path]:
    """The directories in which the files of a model directory lie."""
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    if root.parent.name == "snapshots" and blobs.is_dir():
        return [root, blobs.resolve()]
    return [root]


def _is_companion(file: Path, within: list[Path]) -> bool:
    try:
        if not file.is_file():
            return False
        target = file.resolve()
    except OSError as error:
        raise ModelError(
            f"{file}: can't be read ({error.strerror}); remove it, or make it readable"
        ) from None
    if not any(target.is_relative_to(folder) for folder in within):
        raise ModelError(
            f"{file}: is a link to {target}, outside of the model directory; put the file itself"
            " there"
        )
    if not os.access(target, os.R_OK):
        raise ModelError(f"{file}: can't be read; remove it, or make it readable")
    return True


def _local_code(folder: Path) -> Iterator[str]:
    """The modules of the directory that its configs name."""
    within = _allowed(folder)
    for pattern in _WITH_CODE:
        for file in folder.glob(pattern):
            if _is_companion(file, within):
                for classes in _auto_map(file).values():
                    yield from _modules(classes)


def _auto_map(file: Path) -> dict[str, Any]:
    """The classes that a config names; none of a damaged one, of which its reader tells."""
    try:
        classes = read_json(file).get("auto_map")
    except ModelError:
        return {}
    return classes if isinstance(classes, dict) else {}


def _modules(classes: object) -> list[str]:
    """The modules of an entry of an ``auto_map``, one class or several; those of another
    repository have ``--``.
    """
    listed = classes if isinstance(classes, list) else [classes]
    names = [name for name in listed if isinstance(name, str) and "--" not in name]
    return [name.partition(".")[0] for name in names]


def _forget_missing_code(file: Path) -> None:
    named = _auto_map(file)
    kept = {
        key: classes
        for key, classes in named.items()
        if all((file.parent / f"{module}.py").is_file() for module in _modules(classes))
    }
    if kept != named:
        others = {key: value for key, value in read_json(file).items() if key != "auto_map"}
        _write_json(file, others | ({"auto_map": kept} if kept else {}))


def _with_dtype(config: HFConfig, dtype: str) -> HFConfig:
    """The config with this type where it names the language model's, at its top or in
    ``text_config``.
    """
    text = config.get("text_config")
    keys = {"torch_dtype", "dtype"}
    changed = config | dict.fromkeys(keys & config.keys(), dtype)
    if isinstance(text, dict) and keys & text.keys():
        return changed | {"text_config": text | dict.fromkeys(keys & text.keys(), dtype)}
    return changed if keys & config.keys() else changed | {"dtype": dtype}


def _without_quantization(config: HFConfig) -> HFConfig:
    """The config of weights in their own type, also where ``text_config`` names how the
    source's were quantised.
    """
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    text = kept.get("text_config")
    if isinstance(text, dict):
        kept["text_config"] = {
            key: value for key, value in text.items() if key not in QUANTIZATION_KEYS
        }
    return kept


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
