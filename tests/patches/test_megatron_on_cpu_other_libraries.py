"""The CPU patch's changes to torch must not affect other libraries."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.tiny_models import save_tiny_model

PROGRAM = """
import sys, torch
if sys.argv[2] == "after":
    import megatron_gspo.mcore
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(float(model(input_ids=torch.arange(2, 20)[None]).logits.double().sum()))
"""


def test_transformers_loads_the_same_model_after_the_patch(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}

    def total(when: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, when], env=env, capture_output=True, text=True, check=True
        )
        return float(done.stdout.split()[-1])

    assert total("after") == total("before")
