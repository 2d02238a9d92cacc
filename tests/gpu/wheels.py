"""The packages that the GPU lane needs besides torch and numpy, and their wheels.

    python -m tests.gpu.wheels FOLDER     # where there is a network: downloads them
    python -m tests.gpu.wheels            # prints them, one requirement a line

They are what setup.py requires, pytest and hypothesis, and what these require in turn, in the
versions of the environment that runs this. torch and numpy, with what they require, are the GPU
machine's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "megatron-gspo"
TESTS = ("pytest", "hypothesis")
OWN = ("torch", "numpy")  # of the GPU machine
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1"))


def requirements_of(package: str) -> list[Requirement]:
    """What an installed package requires on the GPU machine's Python, extras left out."""
    environment = {"extra": "", "python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    requirements = [Requirement(line) for line in metadata.requires(package) or ()]
    return [
        item for item in requirements if item.marker is None or item.marker.evaluate(environment)
    ]


def closure(packages: Iterable[str], without: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of the packages and of all that they require, none of ``without``."""
    reached: set[str] = set()
    left = [canonicalize_name(name) for name in packages]
    while left:
        name = left.pop()
        if name in reached or name in without:
            continue
        try:
            required = requirements_of(name)
        except metadata.PackageNotFoundError:  # of another platform or Python
            continue
        reached.add(name)
        left += [canonicalize_name(item.name) for item in required]
    return frozenset(reached)


def needed() -> list[str]:
    """``name==version`` of each package that the machine may lack."""
    own_packages = closure(OWN)
    names = closure(
        (*(item.name for item in requirements_of(PROJECT)), *TESTS), without=own_packages
    )
    return [f"{name}=={metadata.version(name)}" for name in sorted(names)]


def download_command(folder: str) -> list[str]:
    """pip's command for wheels of Linux and the GPU machine's Python."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        folder,
    ]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    return [*command, *(f"--platform={name}" for name in PLATFORMS), *needed()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", help="download the wheels into it")
    folder = parser.parse_args().folder
    if folder is None:
        print("\n".join(needed()))
    else:
        subprocess.run(download_command(folder), check=True)


if __name__ == "__main__":
    main()
