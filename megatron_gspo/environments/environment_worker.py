"""A worker process that runs environments; see `rewards/worker.py`."""

from __future__ import annotations

import sys

from megatron_gspo.environments.environment import Environments, load_environments
from megatron_gspo.rewards.worker import serve

if __name__ == "__main__":
    serve(sys.argv[1:], load_environments, Environments.answer)
