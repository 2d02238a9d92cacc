"""The names that the program gives to files and directories, and the entries of a folder that have
one.

People keep copies, links and notes beside a run's files: `step_best`, `step_000001 (copy).jsonl`,
`latest`. An entry is the program's if it has exactly a name that the program gives, and is a real
file or directory, no link. Nothing else is read, counted, replaced or removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_gspo.errors import RunError
from megatron_gspo.terminal import get_logger

logger = get_logger(__name__)

# Of a temporary name: the processes of a killed run and those of the next one share none.
RANDOM_END = "[0-9a-f]+"


@dataclass(frozen=True)
class StepName:
    """Names that differ in their step, which has at least six digits: `step_000012.jsonl`.

    suffix: after the step. folders: whether they are names of directories.
    """

    suffix: str = ""
    folders: bool = False

    def file_name(self, step: int) -> str:
        """The name for a step."""
        return f"step_{step:06d}{self.suffix}"

    def step(self, name: str) -> int | None:
        """The step of a name; None for one that the program doesn't give."""
        digits = re.fullmatch(r"step_([0-9]{6,})" + re.escape(self.suffix), name)
        return int(digits[1]) if digits and self.file_name(int(digits[1])) == name else None

    def named(self, folder: Path) -> dict[int, Path]:
        """Everything in a folder that has such a name, by step in ascending order; also links
        and other impostors.
        """
        steps = {self.step(name): folder / name for name in _names(folder)}
        return {step: steps[step] for step in sorted(step for step in steps if step is not None)}

    def entries(self, folder: Path) -> dict[int, Path]:
        """The program's entries of a folder by step in ascending order: real files or
        directories with such a name.
        """
        is_real = is_real_folder if self.folders else is_real_file
        return {step: path for step, path in self.named(folder).items() if is_real(path)}


CHECKPOINTS = StepName(folders=True)
BATCHES = StepName(folders=True)
SAMPLES = StepName(".jsonl")
RATIOS = StepName(".npz")


def is_real_file(path: Path) -> bool:
    """Whether it is a file and no link."""
    return os.path.isfile(path) and not os.path.islink(path)


def is_real_folder(path: Path) -> bool:
    """Whether it is a directory and no link."""
    return os.path.isdir(path) and not os.path.islink(path)


def files_named(folder: Path, pattern: str) -> list[Path]:
    """The real files of a folder whose whole name matches a regular expression."""
    return [
        folder / name
        for name in _names(folder)
        if re.fullmatch(pattern, name) and is_real_file(folder / name)
    ]


def folders_named(folder: Path, pattern: str) -> list[Path]:
    """The real directories of a folder whose whole name matches a regular expression."""
    return [
        folder / name
        for name in _names(folder)
        if re.fullmatch(pattern, name) and is_real_folder(folder / name)
    ]


def move_aside(path: Path) -> None:
    """Rename what stands where the program must write to `NAME.kept`, or `NAME.kept_2` and so
    on, and say so.
    """
    number = 1
    kept = path.with_name(f"{path.name}.kept")
    while os.path.lexists(kept):
        number += 1
        kept = path.with_name(f"{path.name}.kept_{number}")
    os.rename(path, kept)
    logger.warning(f"{path} was there and is not this run's: it is now {kept}")


def _names(folder: Path) -> list[str]:
    """All names in a folder; none where it doesn't exist. Raises ``RunError`` for a folder that
    can't be read.
    """
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise RunError(
            f"{folder}: cannot be read: {reason}; make it readable, or choose another run_dir"
        ) from error
