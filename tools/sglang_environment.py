"""The environment of a real SGLang server on a CPU, apart from ours, since it pins other versions. Made on first use.

    python -m megatron_gspo.tools.sglang_environment    # makes .venv-sglang if it's absent, prints its interpreter
    python -m megatron_gspo.tools.sglang_environment 0.5.15.post1

`patches/sglang_on_cpu` holds the pins and what the server needs without a GPU. On GPUs, install SGLang as its own
documentation says and name that interpreter in `sglang.python`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "patches" / "sglang_on_cpu"
VERSIONS = ("0.5.23", "0.5.15.post1")  # the ends of the supported range; the first is the default
# The build for CPUs where the package index has one under this version (as in the Makefile).
TORCH = "torch==2.13.0"


def sglang_python(version: str = VERSIONS[0]) -> str:
    """The interpreter of this version's environment, which is made if it's absent or older than its pins.

    Raises:
        ValueError: there are no pins for this version.
        subprocess.CalledProcessError: pip could not install.
    """
    if version not in VERSIONS:
        raise ValueError(f"no pins for sglang {version!r}; there are some for {', '.join(VERSIONS)}")
    folder = ROOT / (".venv-sglang" if version == VERSIONS[0] else f".venv-sglang-{version}")
    python, stamp = folder / "bin" / "python", folder / ".installed"
    pins = PINS / f"requirements-{version}.txt"
    if stamp.is_file() and stamp.stat().st_mtime >= pins.stat().st_mtime:
        return str(python)
    print(f"making {folder} (sglang {version}, a minute and 3 GB)", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    # torch comes first and alone, so that no other package's requirement can choose another build; the pins are whole,
    # and sglang's own requirements would bring CUDA packages that can't be loaded here
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, TORCH],
        [*pip, "--no-deps", "-r", str(pins)],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    stamp.touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", default=VERSIONS[0], choices=VERSIONS)
    print(sglang_python(parser.parse_args().version))


if __name__ == "__main__":
    main()
