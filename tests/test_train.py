"""The training command: what it answers before Megatron is imported, and that `train` is the
loop's.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("megatron", "transformers", "datasets", "matplotlib")


@pytest.mark.parametrize(
    "arguments, code, says", [(["--help"], 0, "training.steps"), (["gone.yaml"], 2, "gone.yaml")]
)
def test_help_and_a_wrong_config_are_answered_without_megatron(arguments, code, says):
    script = (
        "import sys\n"
        "from megatron_gspo.train import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "finally:\n"
        f"    assert not set({HEAVY}) & set(sys.modules), set({HEAVY}) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code and says in done.stdout + done.stderr, done.stderr
