"""Tokenised prompt files on disk, mapped into memory: one process tokenises a file, all others read
what it wrote.

A cache is a folder named by a digest of all that the prompts depend on. It is written under another
name and renamed, with the size of each file, so that an incomplete one is never used. Arrays are
plain numbers and text is JSON.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, overload

import numpy as np

from megatron_gspo.config import DataConfig
from megatron_gspo.config.data_checks import check_prompt_format
from megatron_gspo.data import prompt_files, prompt_rows, prompts, sample
from megatron_gspo.data.prompt_files import Paths, find_sources, read_rows, split_notes
from megatron_gspo.data.prompt_mix import MixedPrompts
from megatron_gspo.data.prompt_rows import Remarks
from megatron_gspo.data.prompts import (
    PromptSet,
    Tokenizer,
    check_any_left,
    iterate_prompts,
    load_prompts,
    repetition_notes,
    source_name,
    token_digest,
)
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import first_line

_TOKENS = "tokens.i4"
_TOKEN_ENDS = "token_ends.i8"
_RECORDS = "records.json"
_RECORD_ENDS = "record_ends.i8"
_DIGESTS = "token_digests.i8"  # of each prompt's tokens
_MANIFEST = "manifest.json"
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*/*.jinja")
_SETTINGS = (
    "prompt_key",
    "answer_key",
    "chat_template",
    "chat_template_options",
    "system_prompt",
    "system_prompt_key",
    "last_assistant_message",
    "prompt_template",
    "max_prompt_length",
    "overlong_prompts",
)


@dataclasses.dataclass(frozen=True)
class PromptCache:
    """Where prompts are kept."""

    folder: Path
    """Folder of the cache; made if absent."""

    tokenizer_folder: Path
    """The files that the tokenizer is loaded from."""

    warn: Callable[[str], None]
    """Takes a line if the folder cannot be used."""

    def load(
        self, paths: Paths, tokenizer: Tokenizer, data: DataConfig, *, split: str = "train"
    ) -> PromptSet:
        """Like `load_prompts`, from the cache: the first process that needs it writes it and the
        others wait.

        If it cannot be written, each process tokenises for itself, after a warning.
        """
        check_prompt_format(data)
        find_sources(paths, split=split)  # raises for what is not there
        try:
            target = self.folder / cache_key(paths, self.tokenizer_folder, data, split)
            cached = read_cache(target)
            if cached is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                with _locked(target.with_suffix(".lock")):
                    cached = read_cache(target)  # another process may have written it meanwhile
                    if cached is None:
                        write_cache(target, paths, tokenizer, data, split)
                        cached = read_cache(target)
        except OSError as error:
            self.warn(
                f"data.cache_dir = {self.folder}: {first_line(error)}; every process tokenises"
                f" {source_name(paths)}: set it to a folder that can be written and has space"
            )
            cached = None
        return cached or load_prompts(paths, tokenizer, data, split=split)


class MappedPrompts(Sequence[Prompt]):
    """Prompts of a cache. An access makes a new `Prompt`; only the pages that are read are in
    memory.

    largest_token: no prompt has a greater token id.
    """

    def __init__(self, files: dict[str, np.ndarray], largest_token: int, chosen: range) -> None:
        """Prompts of a cache.

        Args:
            files: arrays by name of their file.
            chosen: positions of these prompts in the cache.
        """
        self._files = files
        self.largest_token = largest_token
        self._chosen = chosen

    @property
    def digests(self) -> np.ndarray:
        """[n] int64: `token_digest` of each prompt, without reading them."""
        return self._files[_DIGESTS][self._chosen.start : self._chosen.stop : self._chosen.step]

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> MappedPrompts: ...
    def __getitem__(self, index: int | slice) -> Prompt | MappedPrompts:
        if isinstance(index, slice):
            return MappedPrompts(self._files, self.largest_token, self._chosen[index])
        position = self._chosen[index]
        ids = self._values_of(_TOKENS, _TOKEN_ENDS, position).astype(np.int64)
        text, answer, metadata, messages = json.loads(
            self._values_of(_RECORDS, _RECORD_ENDS, position).tobytes()
        )
        return Prompt(position, ids, text, answer, metadata, messages=messages)

    def _values_of(self, name: str, ends_name: str, position: int) -> np.ndarray:
        """The values of one prompt in a file, whose ends are in another."""
        ends = self._files[ends_name]
        start = ends[position - 1] if position else 0
        return self._files[name][start : ends[position]]


def digests_of(prompts: Sequence[Prompt]) -> np.ndarray:
    """[n] int64: `token_digest` of each prompt."""
    if isinstance(prompts, MappedPrompts):
        return prompts.digests
    if isinstance(prompts, MixedPrompts):
        return np.concatenate([digests_of(source) for source in prompts.sources.values()])
    return np.array([token_digest(prompt) for prompt in prompts], dtype=np.int64)


def cache_key(paths: Paths, tokenizer_folder: Path, data: DataConfig, split: str) -> str:
    """A digest of all that the prompts of files depend on: files, tokenizer files, settings,
    versions and our code.

    The file counts by path, size and times of change, not by its content, which every process would
    have to read. The time of the last change of its inode cannot be set back, so that replacing a
    file by one of the same size and date is seen too.
    """
    sources = find_sources(paths, split=split)
    files: list[Path] = []
    for path, _ in sources:
        files += _files_within(path) if path.is_dir() else [path]
    stats = [(str(file.resolve()), file.stat()) for file in files]
    tokenizer_files = sorted(
        {
            file
            for pattern in _TOKENIZER_FILES
            for file in tokenizer_folder.glob(pattern)
            if file.is_file()
        }
    )
    modules = (prompts, prompt_files, prompt_rows, sample)
    code = [Path(module.__file__ or "") for module in modules] + [Path(__file__)]
    inputs = [
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats],
        [
            (file.relative_to(tokenizer_folder).as_posix(), _digest(file.read_bytes()))
            for file in tokenizer_files
        ],
        {name: getattr(data, name) for name in _SETTINGS},
        [metadata.version("transformers"), metadata.version("tokenizers")],
        [_digest(file.read_bytes()) for file in code],
        [split, *(source_split for _, source_split in sources)],
    ]
    return _digest(json.dumps(inputs).encode())[:32]


def _files_within(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def write_cache(
    target: Path, paths: Paths, tokenizer: Tokenizer, data: DataConfig, split: str
) -> None:
    """Tokenise files into the folder `target`, which is replaced. Raises PromptError, OSError."""
    remarks = Remarks()
    rows = iterate_prompts(read_rows(paths, split=split), tokenizer, data, remarks)
    for leftover in target.parent.glob(f"{target.name}.*.tmp"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    scratch.mkdir()
    try:
        manifest = _write_arrays(scratch, rows, source_name(paths), data.max_prompt_length)
        manifest["notes"] = [*split_notes(paths, split=split), *remarks.lines(), *manifest["notes"]]
        (scratch / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*_DTYPES, _MANIFEST):
            with (scratch / name).open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)  # incomplete, or it would have been used
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read_cache(target: Path) -> PromptSet | None:
    """The prompts in the folder `target`; None if it does not exist or is incomplete."""
    try:
        manifest = json.loads((target / _MANIFEST).read_text(encoding="utf-8"))
        if any((target / name).stat().st_size != size for name, size in manifest["sizes"].items()):
            return None
        count = int(manifest["count"])
        dropped = int(manifest["dropped"])
        largest = int(manifest["largest_token"])
        notes = tuple(str(note) for note in manifest["notes"])
        files = {name: _mapped(target / name, dtype) for name, dtype in _DTYPES.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return PromptSet(MappedPrompts(files, largest, range(count)), dropped, notes)


_DTYPES = {_TOKENS: "<i4", _TOKEN_ENDS: "<i8", _RECORDS: "u1", _RECORD_ENDS: "<i8", _DIGESTS: "<i8"}


def _mapped(file: Path, dtype: str) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _write_arrays(
    folder: Path, rows: Iterable[Prompt | None], source: str, limit: int
) -> dict[str, Any]:
    """Write the arrays of a cache; returns its manifest.

    Args:
        source, limit: for messages.
    """
    ends: dict[str, array[int]] = {_TOKEN_ENDS: array("q"), _RECORD_ENDS: array("q")}
    digests = array("q")
    dropped = 0
    largest = 0
    with (folder / _TOKENS).open("wb") as tokens, (folder / _RECORDS).open("wb") as records:
        for prompt in rows:
            if prompt is None:
                dropped += 1
                continue
            largest = max(largest, int(prompt.token_ids.max()))
            tokens.write(prompt.token_ids.astype("<i4").tobytes())
            record = [prompt.text, prompt.answer, prompt.metadata, prompt.messages]
            records.write(json.dumps(record).encode())
            ends[_TOKEN_ENDS].append(tokens.tell() // 4)
            ends[_RECORD_ENDS].append(records.tell())
            digests.append(token_digest(prompt))
    check_any_left(len(digests), dropped, source=source, limit=limit)
    for name, values in (*ends.items(), (_DIGESTS, digests)):
        np.array(values, dtype=_DTYPES[name]).tofile(folder / name)
    return {
        "count": len(digests),
        "dropped": dropped,
        "largest_token": largest,
        "sizes": {name: (folder / name).stat().st_size for name in _DTYPES},
        "notes": repetition_notes(np.array(digests, dtype=np.int64), source),
    }


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the file's lock, which the system frees when its holder ends. A file system without
    locks has several processes tokenise; each writes a folder of its own."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
