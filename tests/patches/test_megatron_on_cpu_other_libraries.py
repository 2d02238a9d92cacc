"""The CPU patch's changes to torch must not affect other libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

import megatron_gspo.mcore.train_step  # noqa: F401  applies the patches; the fork server of the tests imports it once
from tests.support.tiny_models import save_tiny_model

WITHOUT_THE_PATCH = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(input_ids=torch.arange(2, 20)[None]).logits, sys.argv[2])
"""


def test_transformers_loads_the_same_model_after_the_patch(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", WITHOUT_THE_PATCH, path, tmp_path / "logits.pt"]
    subprocess.run(command, env=environment, check=True)
    model = AutoModelForCausalLM.from_pretrained(path)
    logits = model(input_ids=torch.arange(2, 20)[None]).logits
    assert torch.equal(logits, torch.load(tmp_path / "logits.pt"))
