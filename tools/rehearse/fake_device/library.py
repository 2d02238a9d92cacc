"""The compiled part of the fake device: built once per torch version and loaded before torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_gspo.errors import InputError

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
_COMPILERS = ("c++", "g++", "clang++")


def import_torch_with_fake_device() -> None:
    """Import torch with a CUDA device that has no kernels, for the rest of this process. Libraries
    whose kernels need a real GPU can't be imported then.

    Raises ``InputError`` without torch or a C++ compiler, and ``RuntimeError`` where torch is
    imported already.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake device must be loaded before torch")
    # torch's own libraries call the driver when they are loaded; a rehearsal must not depend on it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = torch_folder()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(build_library(folder)), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401 # it looks up the library's hooks now

    library.set_fake_guard()
    from megatron_gspo.patches.megatron_on_cpu import hide_gpu_libraries

    hide_gpu_libraries()


def torch_folder() -> Path:
    """The folder of the installed torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise InputError("torch is not installed; install it first")
    return Path(spec.origin).parent


def torch_version(folder: Path) -> str:
    """The version of the torch in a folder, which is not imported."""
    match = re.search(
        r"__version__ = ['\"](.+?)['\"]", (folder / "version.py").read_text(encoding="utf-8")
    )
    return match[1] if match else "unknown"


def build_library(folder: Path) -> Path:
    """The library for the torch in ``folder``, compiled into the user's cache folder unless it
    is there.
    """
    version = torch_version(folder)
    key = hashlib.sha256(_SOURCE.read_bytes() + f"{version} {folder}".encode()).hexdigest()[:16]
    target = cache_folder() / f"fake_cuda_{version}_{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=target.parent
    ) as temporary:  # renamed, since ranks may compile it at once
        made = Path(temporary) / target.name
        _compile(made, folder, version)
        os.replace(made, target)
    return target


def cache_folder() -> Path:
    """Where compiled libraries are kept: below XDG_CACHE_HOME, or ~/.cache."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "megatron_gspo"
        / "rehearse"
    )


def compiler() -> str:
    """The C++ compiler: CXX of the environment, or the system's; ``InputError`` without one."""
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        if program := shutil.which(name):
            return program
    raise InputError(
        "a rehearsal compiles 60 lines of C++ once, and no compiler was found; install g++ or"
        " set CXX"
    )


def _compile(target: Path, folder: Path, version: str) -> None:
    includes = [f"-I{folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    command = [
        compiler(),
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-std=c++20",
        _abi_flag(folder),
        *includes,
        str(_SOURCE),
        "-o",
        str(target),
        f"-L{folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = (
            [line for line in done.stderr.splitlines() if "error" in line]
            or done.stderr.splitlines()
            or ["?"]
        )
        raise InputError(
            f"the rehearsal's device library does not compile against torch {version}"
            f" ({errors[0].strip()}); set CXX to a compiler with C++20, such as GCC 11"
        )


def _abi_flag(folder: Path) -> str:
    """Which of the two layouts of C++'s string this torch was built with."""
    settings = folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    text = settings.read_text(encoding="utf-8") if settings.is_file() else ""
    match = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", text)
    return f"-D_GLIBCXX_USE_CXX11_ABI={match[1] if match else 1}"
