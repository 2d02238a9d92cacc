"""The responses of one model to one task: a line of settings, then a line per response, appended as
they come.

The lines of a prompt are consecutive and written at once. A killed evaluation leaves at most one
incomplete prompt at the end of the file, which is removed when the file is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_gspo.data.sample import Sample, json_able
from megatron_gspo.errors import InputError, writing

Record = Mapping[str, Any]


class ResponseFile:
    """Responses of `num_samples` per prompt. `records`: by prompt index, those of complete prompts,
    in their order.

    settings: what the responses depend on, JSON-able. Raises InputError for a file of other
    settings, DiskError where it can't be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], num_samples: int) -> None:
        self.path = path
        self.num_samples = num_samples
        self.records: dict[int, list[Record]] = {}
        settings = json.loads(json.dumps(json_able(settings)))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            end = self._read(settings) if path.is_file() else 0
            self._file = path.open("ab")
            self._file.truncate(end)
            if not end:
                self._append([settings])

    def write(self, groups: Iterable[Sequence[Sample]]) -> None:
        """Append the responses of some prompts, all samples of each, and flush them to the disk."""
        records = [[sample.to_record() for sample in group] for group in groups]
        with writing(self.path):
            self._append([record for group in records for record in group])
        self.records |= {group[0]["prompt_index"]: list(group) for group in records}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> ResponseFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, lines: Iterable[Record]) -> None:
        self._file.write(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        )
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self, settings: Record) -> int:
        """Read the complete prompts; returns the position after the last of them, 0 if there is
        no line of settings.
        """
        end = 0
        open_group = list[Record]()
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    self._check(json.loads(line), settings)
                    end = len(line)
                    continue
                open_group.append(json.loads(line))
                if len(open_group) == self.num_samples:
                    self.records[open_group[0]["prompt_index"]] = open_group
                    end = file.tell()
                    open_group = []
        return end

    def _check(self, found: Record, settings: Record) -> None:
        for key in [*settings, *(key for key in found if key not in settings)]:
            if found.get(key) != settings.get(key):
                was, is_now = (json.dumps(each.get(key))[:80] for each in (found, settings))
                raise InputError(
                    f"{self.path}: its responses are of {key} {was}, and this evaluation has"
                    f" {is_now}; give another --output, or delete the file"
                )
