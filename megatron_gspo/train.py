"""The training command: ``torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value
...]``.

Megatron is imported once the config is read, so that ``--help`` and a wrong key are answered
without it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from megatron_gspo.config import Config, from_command_line
from megatron_gspo.terminal import outlive_terminal

if TYPE_CHECKING:
    from megatron_gspo.loop.checkpoints import LoopState
    from megatron_gspo.rollout.engine_protocol import RolloutEngine

USAGE = r"""torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value ...]
Trains a Hugging Face model with GSPO or another objective on Megatron-Core; all output goes to run_dir.
megatron-gspo train CONFIG.yaml [key=value ...] is the same in one process.
example: megatron-gspo train examples/qwen3_moe/tiny_gspo.yaml model.path=runs/demo/cold_start/hf \
    run_dir=runs/one_process parallel.tensor_model_parallel_size=1 parallel.expert_model_parallel_size=1
megatron-gspo rehearse CONFIG.yaml --world N checks a config for N processes on any machine, without training."""


def train(config: Config, *, engine: RolloutEngine | None = None) -> LoopState:
    """Train until ``training.steps`` steps are done and return the final state. Every rank calls
    it.

    ``engine`` replaces the configured rollout engine. ``torch.distributed`` is started from
    torchrun's environment if it isn't running, and then ended too; without such an environment this
    process is the whole world. SIGUSR1 to any rank ends the run after the current step, with a
    checkpoint. From the call on, this process ignores SIGHUP and drops output that nobody reads any
    more (`terminal.py`).

    Raises ``UserError``, one line, for errors that the user can fix; ``ConfigError`` for an invalid
    config, before any allocation.
    """
    from megatron_gspo.loop import training_loop

    outlive_terminal()
    return training_loop.train(config, engine=engine)


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exits with 0, with 2 for invalid input, with 1 for a run that failed;
    errors are one line.
    """
    outlive_terminal()
    arguments = sys.argv[1:] if arguments is None else arguments
    config = from_command_line(arguments, USAGE)
    try:
        from megatron_gspo.loop import training_loop
        from megatron_gspo.loop.failures import exit_together
    except KeyboardInterrupt:  # the imports take seconds, on a busy machine minutes
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("error: interrupted before the run began; nothing was changed", file=sys.stderr)
        raise SystemExit(130) from None

    parallel = config.parallel
    with exit_together(
        run_dir=config.run_dir,
        backend=parallel.backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
    ):
        training_loop.train(config)


if __name__ == "__main__":  # dist_checkpointing spawns helpers that import this module again
    main()
