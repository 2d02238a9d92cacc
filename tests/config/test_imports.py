"""A config is read without torch, whose import takes seconds: `--help`, workers of verifiers."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", ["megatron_gspo.config", "megatron_gspo.train"])
def test_torch_is_not_imported(module):
    program = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 0
