"""The compiled library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_gspo.errors import InputError
from megatron_gspo.tools.rehearse.fake_device import library


def test_no_compiler_is_one_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match="install g\\+\\+ or set CXX"):
        library.compiler()


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
