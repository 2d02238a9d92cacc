"""The environment of a real SGLang server on a CPU, apart from ours, since it pins other versions. Made on first use.

    python -m megatron_gspo.tools.sglang_environment    # makes .venv-sglang if it's absent, prints its interpreter
    python -m megatron_gspo.tools.sglang_environment 0.5.15.post1    # .venv-sglang-0.5.15.post1

`patches/sglang_on_cpu` holds the pins and what the server needs without a GPU. On GPUs, install SGLang as its own
documentation describes and name that interpreter in `sglang.python`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "patches" / "sglang_on_cpu"
VERSIONS = ("0.5.23", "0.5.15.post1")  # the ends of the supported range; the first is the default
# The build for CPUs where the package index has one under this version (as in the Makefile).
TORCH = "torch==2.13.0"
# What a server loads. Imported once: that compiles it, a quarter of what is installed, and shows that it can be loaded.
LOADED = ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler",
          "sglang.srt.managers.detokenizer_manager", "sglang.srt.models.registry")  # fmt: skip


def sglang_python(version: str = VERSIONS[0]) -> str:
    """The interpreter of this version's environment, which is made if it's absent or of other pins.

    It lies in the checkout, or in the working directory for an installation. That of another version than the default
    has the default's packages below its own: torch and most others are the same, and it's made in a fifth of the time.

    Raises:
        ValueError: there are no pins for this version.
        subprocess.CalledProcessError: pip could not install, or what it installed can't be loaded.
    """
    if version not in VERSIONS:
        raise ValueError(f"no pins for sglang {version!r}; there are some for {', '.join(VERSIONS)}")
    below = Path(sglang_python()).parents[1] if version != VERSIONS[0] else None
    place = ROOT if (ROOT / "setup.py").is_file() else Path.cwd()
    folder = place / (".venv-sglang" if below is None else f".venv-sglang-{version}")
    pins = PINS / f"requirements-{version}.txt"
    made_of = pins.read_text() + ((below / ".installed").read_text() if below else "")
    stamp = folder / ".installed"
    if not stamp.is_file() or stamp.read_text() != made_of:
        print(f"making {folder} (sglang {version})", file=sys.stderr, flush=True)
        _make(folder, pins, below)
        stamp.write_text(made_of)
    return str(folder / "bin" / "python")


def _make(folder: Path, pins: Path, below: Path | None) -> None:
    run = [sys.executable, "-m", "venv", "--clear", str(folder)]
    subprocess.run(run, check=True, stdout=sys.stderr)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    if below is None:
        # torch comes first and alone, so that no other package's requirement can choose another build
        subprocess.run([*pip, TORCH], check=True, stdout=sys.stderr)
    else:
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "below.pth").write_text(f"{below / packages.relative_to(folder)}\n")
    # The pins are whole, and sglang's own requirements would bring CUDA packages that can't be loaded here.
    subprocess.run([*pip, "--no-deps", "-r", str(pins)], check=True, stdout=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": str(PINS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    loading = [python, "-W", "ignore", "-c", f"import {', '.join(LOADED)}"]
    loaded = subprocess.run(loading, env=environment, capture_output=True, text=True)
    if loaded.returncode:  # else its output is about models and options that are not used here
        print(loaded.stderr, file=sys.stderr)
        loaded.check_returncode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", default=VERSIONS[0], choices=VERSIONS)
    print(sglang_python(parser.parse_args().version))


if __name__ == "__main__":
    main()
