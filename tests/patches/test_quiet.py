"""What is left out of the output, and that nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import warnings
from megatron_gspo.patches import quiet
quiet.apply()
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
warnings.warn("your loss is wrong")
warnings.warn("your own deprecation", FutureWarning)
import megatron.core.optimizer.clip_grads
"""


def test_only_the_named_messages_are_left_out():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert "your loss is wrong" in done.stderr and "your own deprecation" in done.stderr
    assert "Apex" not in done.stderr
