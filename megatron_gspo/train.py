"""The training command: ``torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value ...]``.

Megatron is imported once the config is read, so that ``--help`` and a wrong key are answered without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron_gspo.config import Config, ConfigError, from_command_line
from megatron_gspo.config.cli import refuse

if TYPE_CHECKING:
    from megatron_gspo.loop.checkpoints import LoopState
    from megatron_gspo.rollout.engine_protocol import RolloutEngine

USAGE = """torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value ...]
Trains a Hugging Face model with GSPO or another objective on Megatron-Core; all output goes to run_dir.
megatron-gspo train CONFIG.yaml [key=value ...] is the same in one process. With --dry-run N it checks the config for N
processes and builds the model of each pipeline stage on the meta device, on any machine; nothing is trained.
example: megatron-gspo train examples/qwen3_moe/tiny_gspo.yaml model.path=MODEL --dry-run 4"""


def train(config: Config, *, engine: RolloutEngine | None = None) -> LoopState:
    """Train until ``training.steps`` steps are done and return the final state. Every rank calls it.

    ``engine`` replaces the configured rollout engine. ``torch.distributed`` is started from torchrun's environment if
    it isn't running, and then ended too; without such an environment this process is the whole world. SIGUSR1 to any
    rank ends the run after the current step, with a checkpoint.

    Raises ``UserError``, one line, for errors that the user can fix; ``ConfigError`` for an invalid config, before any
    allocation.
    """
    from megatron_gspo.loop import training_loop

    return training_loop.train(config, engine=engine)


def _split_dry_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """The other arguments, and what follows ``--dry-run``."""
    if "--dry-run" not in arguments:
        return arguments, None
    at = arguments.index("--dry-run")
    return arguments[:at] + arguments[at + 2 :], "".join(arguments[at + 1 : at + 2])


def _try_out(config: Config, processes: str) -> int:
    """Dry run for so many processes; the exit code."""
    from megatron_gspo.loop.dry_run import describe, dry_run

    try:
        if not processes.isdecimal() or int(processes) < 1:
            raise ConfigError("--dry-run", processes, "is not a number of processes", "write --dry-run 8 or another")
        print(describe(config, int(processes), dry_run(config, int(processes))))
    except ConfigError as error:
        refuse(error)
    return 0


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exits with 0, with 2 for invalid input, with 1 for a run that failed; errors are one line."""
    arguments, processes = _split_dry_run(sys.argv[1:] if arguments is None else arguments)
    config = from_command_line(arguments, USAGE)
    if processes is not None:
        raise SystemExit(_try_out(config, processes))
    from megatron_gspo.loop import training_loop
    from megatron_gspo.loop.failures import exit_together

    parallel = config.parallel
    with exit_together(
        run_dir=config.run_dir, backend=parallel.backend, timeout_minutes=parallel.distributed_timeout_minutes
    ):
        training_loop.train(config)


if __name__ == "__main__":  # dist_checkpointing spawns helpers that import this module again
    main()
