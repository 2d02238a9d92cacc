"""The compiled library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.rehearse.fake_device import library


def test_it_is_compiled_once_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def compile_(target: Path, folder: Path, version: str) -> None:
        made.append(version)
        target.write_bytes(b"library")

    monkeypatch.setattr(library, "_compile", compile_)
    folder = library.torch_folder()
    first = library.build_library(folder)
    second = library.build_library(folder)
    assert first == second and first.read_bytes() == b"library"
    assert made == [library.torch_version(folder)]
    assert first.parent == tmp_path / "megatron_gspo" / "rehearse"


def test_no_compiler_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match="install g\\+\\+ or set CXX"):
        library.compiler()


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such standard' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(fails))
    with pytest.raises(InputError, match="no such standard"):
        library.build_library(library.torch_folder())


def test_transformer_engine_is_not_there(tmp_path: Path) -> None:
    """Megatron would take its optimizer functions, which need a real GPU, even for a model of
    torch layers.
    """
    (tmp_path / "transformer_engine.py").write_text(
        "raise OSError('libcuda.so.1: cannot open shared object file')"
    )
    code = f"""
from {library.__name__} import import_torch_with_fake_device
import_torch_with_fake_device()
from megatron.core.optimizer import clip_grads
from megatron_gspo.mcore.layers import transformer_engine_available
print(clip_grads.multi_tensor_applier.__module__, transformer_engine_available())
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["megatron.core.utils", "False"]
