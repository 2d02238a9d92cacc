"""An environment from a file, and requests to it."""

from pathlib import Path

import numpy as np

from megatron_gspo.data.sample import Prompt
from megatron_gspo.environments.environment import StepRequest

FILE = Path(__file__).with_name("example_environments.py")
COUNTDOWN = f"{FILE}:countdown"


def request(*responses, prompt=7, sample=0, seed=1):
    return StepRequest(Prompt(prompt, np.array([3]), "question"), sample, seed, responses)
