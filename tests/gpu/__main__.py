"""The GPU lane: the tests of this folder on the GPUs of this machine, then ``benchmarks/gpu.py``,
beside the memory that a rehearsal of its step predicts, then ``benchmarks/gpu_probe.py``.

    python -m tests.gpu [--wheels FOLDER] [arguments for pytest]

Runs from a checkout, without a network. ``--wheels``: install what is missing from a folder of
wheels (`tests/gpu/wheels.py`) into build/gpu, beside the machine's own packages. Without a GPU it
exits with 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "build" / "gpu"
STEP = ROOT / "build" / "gpu_step"  # the benchmark's step, as a config
REHEARSED = STEP / "rehearsed.json"


def reason_to_skip(devices: Path = Path("/dev")) -> str | None:
    """Why there is nothing to run; None with a GPU. Raises ``SystemExit`` for a GPU without
    torch that can use it.
    """
    nodes = list(devices.glob("nvidia[0-9]*")) + list(devices.glob("dxg"))
    if find_spec("torch") is None:
        if nodes:
            raise SystemExit(
                "there is a GPU and no torch: install a CUDA build, or name the Python that has it"
            )
        return "no CUDA GPU, no torch"
    import torch

    if torch.cuda.is_available():
        return None
    if nodes and torch.version.cuda is None:
        raise SystemExit(f"there is a GPU, but torch {torch.__version__} is not a CUDA build")
    return f"no CUDA GPU (torch {torch.__version__})"


def install(wheels: Path) -> None:
    """Install the wheels of a folder into ``PACKAGES``."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(
            f"--wheels {wheels}: no wheels there; python -m tests.gpu.wheels {wheels} downloads"
            " them"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--upgrade",
        "--target",
    ]
    subprocess.run([*command, str(PACKAGES), *files], check=True)


def environment() -> dict[str, str]:
    """Of the tests and the benchmark: the checkout and the installed wheels come first."""
    paths = [
        str(ROOT),
        *([str(PACKAGES)] if PACKAGES.is_dir() else []),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def commands(pytest_arguments: list[str]) -> dict[str, list[str]]:
    """What the lane runs, in this order."""
    python = sys.executable
    benchmark = "benchmarks/gpu.py"
    return {
        "tests": [
            python,
            "-m",
            "pytest",
            "tests/gpu",
            "-k",
            "not cpu",
            "-v",
            "-rs",
            "--durations=10",
            "-o",
            "faulthandler_timeout=120",
            *pytest_arguments,
        ],
        "config": [python, benchmark, "--config", str(STEP)],
        "rehearsal": [
            python,
            "-m",
            "megatron_gspo",
            "rehearse",
            str(STEP / "config.yaml"),
            "--world",
            "1",
            "--json",
            str(REHEARSED),
        ],
        "benchmark": [python, benchmark, "--rehearsed", str(REHEARSED)],
        "probe": [python, "-m", "benchmarks.gpu_probe"],
    }


def run(steps: dict[str, list[str]]) -> list[str]:
    """The steps that fail, of all; without a rehearsal the benchmark measures alone."""
    failed: list[str] = []
    for name, command in steps.items():
        if name == "benchmark" and "rehearsal" in failed:
            command = command[: command.index("--rehearsed")]
        if subprocess.run(command, cwd=ROOT, env=environment()).returncode:
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    arguments, others = parser.parse_known_args()
    began = time.monotonic()
    reason = reason_to_skip()
    if reason is not None:
        print(f"make gpu: skipped: {reason}")
        return
    if arguments.wheels:
        install(arguments.wheels)
    failed = run(commands(others))
    print(f"make gpu: {(time.monotonic() - began) / 60:.1f} minutes")
    if failed:
        raise SystemExit(f"the GPU lane failed: {', '.join(failed)}; see above")


if __name__ == "__main__":
    main()
