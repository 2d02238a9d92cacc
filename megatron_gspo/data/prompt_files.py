"""Rows of prompt files: JSON, Parquet, Arrow, CSV, folders of these, and data sets saved by
`datasets`.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_gspo.config.prompt_paths import matching_paths
from megatron_gspo.data.optional_module import optional_module
from megatron_gspo.errors import InputError, first_line

Row = dict[str, Any]
Location = str  # of a row, for error messages: "data.jsonl line 3"
Rows = Iterator[tuple[Location, Row]]
Paths = str | Path | Sequence[str | Path]

HELD_OUT = "held out"  # in place of a split's name: test, or else validation
# As the Hugging Face hub names splits, in files and folders.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_SUPPORTED = (
    ".jsonl, .parquet, .json, .arrow, .csv or .tsv, a folder of these, or a directory written by"
    " datasets' save_to_disk"
)
_SAVED = ("state.json", "dataset_dict.json")  # one of them is in a directory of save_to_disk
_DESCRIBING = frozenset({*_SAVED, "dataset_info.json", "dataset_infos.json"})
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


class PromptError(InputError):
    """Prompts that can't be used; one line naming the file, the row, the key and the fix."""


def read_rows(paths: Paths, *, split: str = "train") -> Rows:
    """All rows of prompt files, each with its location, one after another.

    paths: what `data.prompts` takes: a file (`.jsonl`, `.ndjson`, `.json`, `.parquet`, `.arrow`,
        `.csv`, `.tsv`; JSON and CSV also with `.gz`, `.bz2`, `.xz` or `.zst`), a folder of files of
        one of these formats, a directory saved by `datasets`, a glob, a list of these, or
        `path:split`.
    split: which split to read where there are several and the path names none; HELD_OUT is test,
        else validation.
    Raises PromptError for a missing, unreadable or unknown file; for an invalid row when it is
        reached.
    """
    sources = find_sources(paths, split=split)
    first = open_source(*sources[0])  # now, not at the first row
    others = itertools.chain.from_iterable(open_source(*source) for source in sources[1:])
    return itertools.chain(first, others)


def find_sources(paths: Paths, *, split: str = "train") -> list[tuple[Path, str | None]]:
    """(path, split) of each file and saved data set, in the order of reading; see `read_rows`.

    The split is None for what has none. Raises PromptError.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else paths
    return [source for path in listed for source in _sources_of(path, split)]


def split_notes(paths: Paths, *, split: str = "train") -> list[str]:
    """A line for each path of which a split is read that the path does not name, besides
    "train" for training.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else paths
    notes = []
    for path in listed:
        for match, named_split in matching_paths(path):
            splits = _splits_of(match)
            if named_split is None and splits and split == HELD_OUT:
                chosen = _choose_split(match, splits, split)
                notes.append(
                    f"{match}: the split {chosen} is read (of {', '.join(sorted(splits))})"
                )
    return notes


def _sources_of(written: str | Path, split: str) -> list[tuple[Path, str | None]]:
    matches = matching_paths(written)
    if not matches:
        raise PromptError(f"{written}: no such file; check the path (relative to {Path.cwd()})")
    sources: list[tuple[Path, str | None]] = []
    for path, named_split in matches:
        splits = _splits_of(path)
        if not splits and named_split is not None:
            raise PromptError(f"{path}: has no splits; leave out :{named_split}")
        if not splits:
            sources += [(file, None) for file in _files_of(path)]
            continue
        chosen = _choose_split(path, splits, named_split or split)
        if _is_saved(path):
            sources.append((path, chosen))
        else:
            sources += [(file, None) for file in _in_one_folder(path, splits[chosen])]
    return sources


def _splits_of(path: Path) -> dict[str, list[Path]]:
    """The files of each split in a folder, by the names of files and folders; of a saved data set,
    the splits' names.

    Empty if nothing tells splits apart.
    """
    if not path.is_dir():
        return {}
    if (path / "dataset_dict.json").is_file():
        try:
            names = list(
                json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = first_line(error)
            raise PromptError(
                f"{path}: not a saved dataset ({reason}); write it with save_to_disk"
            ) from error
        return {str(name): [] for name in names}
    if _is_saved(path):
        return {}
    splits: dict[str, list[Path]] = {}
    unnamed = []
    for file in _files_of(path):
        name = _split_name(file.relative_to(path))
        if name is None:
            unnamed.append(file)
        else:
            splits.setdefault(name, []).append(file)
    if splits and unnamed:
        raise PromptError(
            f"{path}: has files of the splits {', '.join(sorted(splits))}, and others"
            f" ({unnamed[0].name}); give a file, a list or a glob"
        )
    return splits


def _split_name(file: Path) -> str | None:
    for split, words in _SPLIT_WORDS.items():
        if re.search(
            rf"(?:^|[-._ /\d])(?:{'|'.join(words)})(?:[-._ /\d]|$)", file.as_posix().lower()
        ):
            return split
    return None


def _choose_split(path: Path, splits: dict[str, list[Path]], wanted: str) -> str:
    candidates = (
        (*_SPLIT_WORDS["test"], *_SPLIT_WORDS["validation"]) if wanted == HELD_OUT else (wanted,)
    )
    for name in candidates:
        if name in splits:
            return name
    names = ", ".join(sorted(splits))
    missing = "no split test or validation" if wanted == HELD_OUT else f"no split {wanted!r}"
    raise PromptError(
        f"{path}: has {missing}; it has {names}; name one, as {path}:{sorted(splits)[0]}"
    )


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in _SAVED)


def _files_of(path: Path) -> list[Path]:
    """The files of a folder that is no saved data set, all of one format; the path itself if it
    is a file or saved.
    """
    if not path.is_dir() or _is_saved(path):
        return [path]
    inside = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not _is_hidden(file.relative_to(path))
    ]
    files = [
        file for file in inside if file.name not in _DESCRIBING and _reader_of(file) is not None
    ]
    # Beside them, .json is often a description.
    tables = [file for file in files if _format_of(file)[0] != ".json"]
    files = tables or files
    if not files:
        raise PromptError(
            f"{path}: not a saved dataset (it has neither {' nor '.join(_SAVED)}, and no file of"
            f" prompts); write it with save_to_disk, or use {_SUPPORTED}"
        )
    formats = Counter(_format_of(file)[0] for file in files)
    if len(formats) > 1:
        raise PromptError(
            f"{path}: has files of several formats ({', '.join(sorted(formats))}); give a glob"
            " of one"
        )
    return files


def _in_one_folder(path: Path, files: list[Path]) -> list[Path]:
    """The files; PromptError if they are in several folders, as those of a data set with
    several configurations.
    """
    folders = sorted({file.parent for file in files})
    if len(folders) > 1:
        names = ", ".join(folder.relative_to(path).as_posix() for folder in folders)
        raise PromptError(
            f"{path}: has one split in several folders ({names}); give one of them, or a glob"
        )
    return files


def _is_hidden(path: Path) -> bool:
    return any(name.startswith((".", "_")) for name in path.parts)


def open_source(path: Path, split: str | None) -> Rows:
    """The rows of one file or saved data set; see `find_sources`. Raises PromptError."""
    if path.is_dir():
        return _read_saved(path, split)
    reader = _reader_of(path)
    if reader is None:
        raise PromptError(
            f"{path}: unknown kind {path.suffix or '(no suffix)'!r}; use {_SUPPORTED}"
        )
    return reader(path)


def _format_of(path: Path) -> tuple[str, str]:
    """(suffix of the format, suffix of the compression or "")."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    return (suffixes[-1] if suffixes else "", compression)


def _reader_of(path: Path) -> Callable[[Path], Rows] | None:
    suffix, compression = _format_of(path)
    return _TEXT_READERS.get(suffix) or (None if compression else _TABLE_READERS.get(suffix))


def _open_text(path: Path) -> BinaryIO:
    """A file of text, unpacked."""
    try:
        return _COMPRESSIONS[_format_of(path)[1]](path)
    except OSError as error:
        raise PromptError(
            f"{path}: cannot be read ({first_line(error)}); check the file"
        ) from error


def _open_zstandard(path: Path) -> BinaryIO:
    arrow = optional_module("pyarrow", "pyarrow", "data", f"reading {path}")
    return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_gzip(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path))


def _open_bzip2(path: Path) -> BinaryIO:
    return io.BufferedReader(bz2.open(path))


def _open_xz(path: Path) -> BinaryIO:
    return io.BufferedReader(lzma.open(path))


_COMPRESSIONS: dict[str, Callable[[Path], BinaryIO]] = {
    "": _open_plain,
    ".gz": _open_gzip,
    ".bz2": _open_bzip2,
    ".xz": _open_xz,
    ".zst": _open_zstandard,
}


def _read_json_lines(path: Path) -> Rows:
    file = _open_text(path)

    def rows() -> Rows:
        number = 0
        with file:
            try:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        location = f"{path} line {number}"
                        yield location, _json_row(location, line)
            except PromptError:
                raise
            except _UNREADABLE as error:
                reason = first_line(error)
                raise PromptError(
                    f"{path} line {number + 1}: cannot be read ({reason}); write it again"
                ) from error

    return rows()


def _read_json(path: Path) -> Rows:
    """A list of objects, or JSON lines."""
    with _open_text(path) as file:
        try:
            start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
            content = start + file.read() if start.startswith(b"[") else b""
        except _UNREADABLE as error:
            raise PromptError(
                f"{path}: cannot be read ({first_line(error)}); write it again"
            ) from error
    if not content:
        return _read_json_lines(path)
    rows = _parse_json(str(path), content)
    for number, row in enumerate(rows, start=1):
        _check_row(f"{path} row {number}", row)
    return _numbered(path, rows)


def _json_row(location: Location, line: bytes) -> Row:
    return _check_row(location, _parse_json(location, line))


def _check_row(location: Location, row: object) -> Row:
    if not isinstance(row, dict):
        raise PromptError(f"{location}: a JSON {type(row).__name__}; write one JSON object a line")
    return row


def _parse_json(location: Location, text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise PromptError(
            f"{location}: is nested too deeply to be read; write it flatter"
        ) from error
    except ValueError as error:  # bad JSON, not UTF-8, or a number of thousands of digits
        reason = str(error).split("\n")[0]
        if "integer string conversion" in reason:
            problem = "has a number of more digits than Python reads"
            raise PromptError(f"{location}: {problem}; write it as text, in quotes") from error
        raise PromptError(
            f"{location}: not JSON ({reason}); write one JSON object a line"
        ) from error


def _read_csv(path: Path) -> Rows:
    """Every field is text; an empty one is None."""
    separator = "\t" if _format_of(path)[0] == ".tsv" else ","
    file = io.TextIOWrapper(_open_text(path), encoding="utf-8-sig", newline="")

    def rows() -> Rows:
        csv.field_size_limit(1 << 30)  # the module's own is 128 KiB
        reader = csv.DictReader(file, delimiter=separator, strict=True)
        with file:
            try:
                for row in reader:
                    location = f"{path} line {reader.line_num}"
                    if None in row:
                        raise PromptError(
                            f"{location}: has more fields than the first line; quote what has a"
                            " comma"
                        )
                    yield location, {key: value or None for key, value in row.items()}
            except PromptError:
                raise
            except (csv.Error, *_UNREADABLE) as error:
                raise PromptError(
                    f"{path} after line {reader.line_num}: not CSV ({first_line(error)}); write it"
                    " again in UTF-8"
                ) from error

    return rows()


def _read_parquet(path: Path) -> Rows:
    parquet = optional_module("pyarrow.parquet", "pyarrow", "data", f"reading {path}")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
    except (ValueError, OSError) as error:  # pyarrow's errors derive from these two
        raise PromptError(
            f"{path}: not Parquet ({first_line(error)}); write the file again"
        ) from error
    return _batch_rows(path, batches)


def _read_arrow(path: Path) -> Rows:
    """An Arrow stream, as `datasets` writes it, or an Arrow file."""
    arrow = optional_module("pyarrow", "pyarrow", "data", f"reading {path}")
    source = arrow.memory_map(str(path)) if path.stat().st_size else arrow.BufferReader(b"")
    try:
        return _batch_rows(path, arrow.ipc.open_stream(source))
    except (ValueError, OSError):
        pass
    try:
        reader = arrow.ipc.open_file(source)
    except (ValueError, OSError) as error:
        raise PromptError(
            f"{path}: not Arrow ({first_line(error)}); write the file again"
        ) from error
    return _batch_rows(path, (reader.get_batch(i) for i in range(reader.num_record_batches)))


def _batch_rows(path: Path, batches: Iterable[Any]) -> Rows:
    """The rows of Arrow's record batches."""
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path} row {number}", row
    except (ValueError, OSError) as error:
        reason = first_line(error)
        raise PromptError(
            f"{path}: cannot be read after row {number} ({reason}); write it again"
        ) from error


def _read_saved(path: Path, split: str | None) -> Rows:
    datasets = optional_module("datasets", "datasets", "data", f"reading {path}")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (ValueError, OSError, KeyError, TypeError) as error:
        reason = first_line(error)
        raise PromptError(
            f"{path}: not a saved dataset ({reason}); write it with save_to_disk"
        ) from error
    if split is not None:
        loaded = loaded[split]
    return _numbered(path, loaded.with_format(None))  # Python's values, whatever format was saved


def _numbered(path: Path, rows: Iterable[Row]) -> Rows:
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, start=1))


_TEXT_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
_TABLE_READERS: dict[str, Callable[[Path], Rows]] = {
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
