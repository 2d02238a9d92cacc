"""A process of its own that runs environments; see `data/reward_worker.py`."""

from __future__ import annotations

import sys

from megatron_gspo.data.reward_worker import serve
from megatron_gspo.rollout.environment import Environments, load_environments

if __name__ == "__main__":
    serve(sys.argv[1:], load_environments, Environments.answer)
