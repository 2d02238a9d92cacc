"""Copy the example configs, environments and launch scripts of this installation to a folder.

    megatron-gspo examples [FOLDER]

The commands of the documentation name files as ``examples/...``: after ``megatron-gspo examples``
they work in any directory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# Next to tools/ in a checkout and, by setup.py, in an installation (megatron_gspo/examples).
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EXAMPLE_RUNS = EXAMPLES / "qwen3_moe"


def copy_examples(folder: Path) -> list[Path]:
    """Copy every example to ``folder``, which is created. Returns the files.

    Raises FileExistsError, before anything is written, where a file that differs would be
    overwritten.
    """
    files = {
        file: folder / file.relative_to(EXAMPLES)
        for file in sorted(EXAMPLES.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    for source, target in files.items():
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise FileExistsError(
                f"{target} exists and differs; remove it or choose another folder"
            )
    for source, target in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)  # with its mode: launch scripts stay executable
    return list(files.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 where a file can't be written."""
    parser = argparse.ArgumentParser(
        prog="megatron-gspo examples",
        description="Copy the example configs, environments and launch scripts to a folder.",
        epilog=(
            "example: megatron-gspo examples && megatron-gspo train"
            " examples/qwen3_moe/tiny_gspo.yaml --help"
        ),
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("examples"), help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    try:
        files = copy_examples(options.folder)
    except OSError as error:
        print(f"megatron-gspo examples: {error}", file=sys.stderr)
        return 2
    print(f"{len(files)} files in {options.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
