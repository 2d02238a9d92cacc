"""Tokenised prompt files on disk, mapped into memory: one process tokenises a file, all others read what it wrote.

A cache is a folder named by a digest of all that the prompts depend on. It is written under another name and renamed,
with the size of each file, so that an incomplete one is never used. Arrays are plain numbers and text is JSON.
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
from megatron_gspo.data import prompt_files, prompts, sample
from megatron_gspo.data.prompt_files import read_rows
from megatron_gspo.data.prompts import PromptSet, Tokenizer, check_any_left, iterate_prompts, load_prompts
from megatron_gspo.data.sample import Prompt
from megatron_gspo.errors import first_line

_TOKENS, _TOKEN_ENDS, _RECORDS, _RECORD_ENDS = "tokens.i4", "token_ends.i8", "records.json", "record_ends.i8"
_MANIFEST = "manifest.json"
_TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*/*.jinja")
_SETTINGS = ("prompt_key", "answer_key", "chat_template", "system_prompt", "prompt_template", "max_prompt_length",
             "overlong_prompts")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PromptCache:
    """Where prompts are kept. folder: made if absent. tokenizer_folder: the files that the tokenizer is loaded from.
    warn: takes a line if the folder cannot be used."""

    folder: Path
    tokenizer_folder: Path
    warn: Callable[[str], None]

    def load(self, path: str | Path, tokenizer: Tokenizer, data: DataConfig, *, split: str = "train") -> PromptSet:
        """As `load_prompts`, from the cache; the first process that needs it writes it and the others wait.

        If it cannot be written, each process tokenises for itself, after a warning.
        """
        check_prompt_format(data)
        path = Path(path)
        if not path.exists():
            return load_prompts(path, tokenizer, data, split=split)  # raises
        try:
            target = self.folder / cache_key(path, self.tokenizer_folder, data, split)
            found = read_cache(target)
            if found is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                with _locked(target.with_suffix(".lock")):
                    found = read_cache(target)  # another process may have written it meanwhile
                    if found is None:
                        write_cache(target, path, tokenizer, data, split)
                        found = read_cache(target)
        except OSError as error:
            self.warn(f"data.cache_dir = {self.folder}: {first_line(error)}; every process tokenises {path}: set it to "
                      "a folder that can be written and has space")  # fmt: skip
            found = None
        return found or load_prompts(path, tokenizer, data, split=split)


class MappedPrompts(Sequence[Prompt]):
    """Prompts of a cache. An access makes a new `Prompt`; only the pages that are read are in memory.

    largest_token: no prompt has a greater token id.
    """

    def __init__(self, files: dict[str, np.ndarray], largest_token: int, chosen: range) -> None:
        """files: arrays by name of their file. chosen: positions of these prompts in the cache."""
        self._files, self.largest_token, self._chosen = files, largest_token, chosen

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
        ids = self._part(_TOKENS, _TOKEN_ENDS, position).astype(np.int64)
        text, answer, metadata = json.loads(self._part(_RECORDS, _RECORD_ENDS, position).tobytes())
        return Prompt(position, ids, text, answer, metadata)

    def _part(self, name: str, ends: str, position: int) -> np.ndarray:
        bounds = self._files[ends]
        return self._files[name][bounds[position - 1] if position else 0 : bounds[position]]


def cache_key(path: Path, tokenizer_folder: Path, data: DataConfig, split: str) -> str:
    """A digest of all that the prompts of a file depend on: file, tokenizer files, settings, versions and our code.

    The file counts by path, size and times of change, not by its content, which every process would have to read. The
    time of the last change of its inode cannot be set back, so that replacing a file by one of the same size and date
    is seen too.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(str(file.resolve()), file.stat()) for file in files]
    code = [Path(module.__file__ or "") for module in (prompts, prompt_files, sample)] + [Path(__file__)]
    names = sorted({file for pattern in _TOKENIZER_FILES for file in tokenizer_folder.glob(pattern) if file.is_file()})
    parts: list[Any] = [
        [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats],
        [(file.relative_to(tokenizer_folder).as_posix(), _digest(file.read_bytes())) for file in names],
        {name: getattr(data, name) for name in _SETTINGS},
        [metadata.version("transformers"), metadata.version("tokenizers")],
        [_digest(file.read_bytes()) for file in code],
        split,
    ]
    return _digest(json.dumps(parts).encode())[:32]


def write_cache(target: Path, path: Path, tokenizer: Tokenizer, data: DataConfig, split: str) -> None:
    """Tokenise a file into the folder `target`, which is replaced. Raises PromptError, OSError."""
    rows = iterate_prompts(read_rows(path, split=split), tokenizer, data)
    for left in target.parent.glob(f"{target.name}.*.tmp"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    scratch = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    scratch.mkdir()
    try:
        _write_files(scratch, rows, path, data)
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
        count, dropped, largest = (int(manifest[key]) for key in ("count", "dropped", "largest_token"))
        files = {name: _mapped(target / name, dtype) for name, dtype in _DTYPES.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return PromptSet(MappedPrompts(files, largest, range(count)), dropped)


_DTYPES = {_TOKENS: "<i4", _TOKEN_ENDS: "<i8", _RECORDS: "u1", _RECORD_ENDS: "<i8"}


def _mapped(file: Path, dtype: str) -> np.ndarray:
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def _write_files(folder: Path, rows: Iterable[Prompt | None], path: Path, data: DataConfig) -> None:
    ends: dict[str, array[int]] = {_TOKEN_ENDS: array("q"), _RECORD_ENDS: array("q")}
    dropped = largest = 0
    with (folder / _TOKENS).open("wb") as tokens, (folder / _RECORDS).open("wb") as records:
        for prompt in rows:
            if prompt is None:
                dropped += 1
                continue
            largest = max(largest, int(prompt.token_ids.max()))
            tokens.write(prompt.token_ids.astype("<i4").tobytes())
            records.write(json.dumps([prompt.text, prompt.answer, prompt.metadata]).encode())
            ends[_TOKEN_ENDS].append(tokens.tell() // 4)
            ends[_RECORD_ENDS].append(records.tell())
    count = len(ends[_TOKEN_ENDS])
    check_any_left(count, dropped, source=str(path), limit=data.max_prompt_length)
    for name, values in ends.items():
        np.array(values, dtype=_DTYPES[name]).tofile(folder / name)
    sizes = {name: (folder / name).stat().st_size for name in _DTYPES}
    manifest = {"count": count, "dropped": dropped, "largest_token": largest, "sizes": sizes}
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for name in (*_DTYPES, _MANIFEST):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the file's lock, which the system frees when its holder ends. A file system without locks has several
    processes tokenise; each writes a folder of its own."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
