"""The training loop: ``torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value ...]``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.config import Config, ConfigError, from_command_line
from megatron_gspo.config.cli import refuse
from megatron_gspo.errors import EngineError
from megatron_gspo.loop.assemble import Run, assemble
from megatron_gspo.loop.dry_run import describe, dry_run
from megatron_gspo.loop.evaluate import evaluate
from megatron_gspo.loop.experience import collect
from megatron_gspo.loop.guard import run_guarded
from megatron_gspo.loop.probe import probe
from megatron_gspo.loop.record import Recorder, throughput
from megatron_gspo.loop.resume import LoopState, resume, sole_writer
from megatron_gspo.loop.saves import saved_where_servers_fail, writing_checkpoints
from megatron_gspo.loop.servers import server_counts, sync_weights
from megatron_gspo.loop.stop import stop_on_signal
from megatron_gspo.loop.timers import Timers
from megatron_gspo.loop.update import update
from megatron_gspo.mcore.process_groups import shutdown
from megatron_gspo.models.hf_checkpoint import write_checkpoint
from megatron_gspo.rollout.engine_protocol import RolloutEngine

USAGE = """torchrun --nproc-per-node N -m megatron_gspo.train CONFIG.yaml [key=value ...]
Trains a Hugging Face model with GSPO or another objective on Megatron-Core; all output goes to run_dir.
megatron-gspo train CONFIG.yaml [key=value ...] is the same in one process. With --dry-run N it checks the config for N
processes and builds the model of each pipeline stage on the meta device, on any machine; nothing is trained.
example: megatron-gspo train examples/qwen3_moe/tiny_gspo.yaml model.path=MODEL --dry-run 4"""


def train(config: Config, *, engine: RolloutEngine | None = None) -> LoopState:
    """Run the whole loop on this rank; ``engine`` replaces the configured source of samples. Returns the final state.

    ``torch.distributed`` is started from torchrun's environment if it isn't running, and then ended too; without such
    an environment this process is the whole world. SIGUSR1 to any rank ends it after the step, with a checkpoint.
    Raises ``UserError`` for whatever the user can mend: one line, a ``ConfigError`` before any allocation for a config
    that can't work.
    """
    own = not dist.is_initialized()
    config.check(int(os.environ.get("WORLD_SIZE", 1)))
    with stop_on_signal() as asked_to_stop:
        run = assemble(config, engine=engine)
        try:
            with sole_writer(run):
                return _loop(run, asked_to_stop)
        finally:
            run.close()
            shutdown(keep_distributed=not own)


def _loop(run: Run, asked_to_stop: Callable[[], bool]) -> LoopState:
    config, timers = run.config, Timers()
    state, found = resume(run)
    with Recorder(run, resume_step=state.step) as recorder, writing_checkpoints(run, found) as saves:
        started = time.monotonic() - state.wall_seconds
        if run.eval_prompts and config.evaluation.at_start and state.step == 0:
            record = evaluate(run, state.step, timers)
            state.accuracy_before = state.accuracy_after = record["eval/accuracy"]
            recorder.log(0, record | timers.take())
        while state.step < config.training.steps:
            with saved_where_servers_fail(run, saves, state):
                experience = collect(run, state.step, state.place, timers, checkpoint=saves.current)
            saves.poll(timers)  # where most of a step's time is over
            saves.forget()
            done = update(run, experience.samples, state.step, timers, experience.routing)
            metrics = experience.metrics | done.metrics | experience.routing.metrics()
            state.step, state.place = state.step + 1, experience.place
            state.samples += len(experience.samples)
            state.tokens += sum(sample.length for sample in experience.samples)
            lost = None
            try:
                metrics |= _prepare_next(run, state, timers)
            except EngineError as error:  # every rank's; the step is recorded and saved all the same
                lost = error
            state.wall_seconds = time.monotonic() - started
            recorder.log(
                state.step,
                metrics | throughput(experience.samples, timers.take(), metrics.get("perf/trained_tokens", 0.0)),
            )
            recorder.write_samples(state.step, experience.samples)
            recorder.write_routing(state.step, experience.routing)
            recorder.write_ratios(state.step, done)
            recorder.write_rollouts(state.step, experience.samples, experience.place)
            with saved_where_servers_fail(run, saves, state):
                if lost is not None:
                    raise lost
            stops = asked_to_stop()
            if stops or _is_due(config.checkpoint.save_interval, state.step, config.training.steps):
                with timers("checkpoint"):  # told with the next step's times: a step is recorded before it is saved
                    saves.begin(state)
            if stops and state.step < config.training.steps:
                saves.finish()
                recorder.say(f"stopped by SIGUSR1 after step {state.step}; start again to go on from {saves.current}")
                return state
        saves.finish()
        state.wall_seconds = time.monotonic() - started
        exported = _export(run) if config.checkpoint.export_hf else None
        recorder.finish(asdict(state) | {"exported": exported and str(exported)})
    return state


def _prepare_next(run: Run, state: LoopState, timers: Timers) -> dict[str, float]:
    """Send the new weights to the engine, and evaluate them where that is due."""
    metrics: dict[str, float] = {}
    if run.generates_on_policy:
        with timers("weight_sync"):
            sync_weights(run, state.step)
        metrics |= probe(run, state.step, timers) | server_counts(run)
    if _evaluates(run, state.step):
        metrics |= evaluate(run, state.step, timers)
        state.accuracy_after = metrics["eval/accuracy"]
    return metrics


def _evaluates(run: Run, step: int) -> bool:
    evaluation = run.config.evaluation
    if not run.eval_prompts:
        return False
    at_end = evaluation.at_end and step == run.config.training.steps
    return at_end or bool(evaluation.eval_interval and step % evaluation.eval_interval == 0)


def _is_due(interval: int, step: int, last: int) -> bool:
    """Whether an interval (0: never) asks for a checkpoint after ``step``; the last step always does."""
    return bool(interval) and (step % interval == 0 or step == last)


def _export(run: Run) -> Path | None:
    """Write the trained model as ``run_dir/hf``; all ranks stream, one writes."""
    stream = run.policy.weights()
    if run.is_writer:
        return write_checkpoint(Path(run.config.run_dir) / "hf", stream, source=run.config.model.path)
    for _ in stream:
        pass
    return None


def _split_dry_run(arguments: list[str]) -> tuple[list[str], str | None]:
    """The other arguments, and what follows ``--dry-run``."""
    if "--dry-run" not in arguments:
        return arguments, None
    place = arguments.index("--dry-run")
    return arguments[:place] + arguments[place + 2 :], "".join(arguments[place + 1 : place + 2])


def _try_out(config: Config, processes: str) -> int:
    """Dry run on so many processes; the exit code."""
    try:
        if not processes.isdecimal() or int(processes) < 1:
            raise ConfigError("--dry-run", processes, "is no number of processes", "write --dry-run 8 or another")
        print(describe(config, int(processes), dry_run(config, int(processes))))
    except ConfigError as error:
        refuse(error)
    return 0


def main(arguments: list[str] | None = None) -> None:
    """The command line. Exits with 0, 2 for an input that can't work or 1 for a run that failed, with one line."""
    arguments, processes = _split_dry_run(sys.argv[1:] if arguments is None else arguments)
    config = from_command_line(arguments, USAGE)
    if processes is not None:
        raise SystemExit(_try_out(config, processes))
    parallel = config.parallel
    code = run_guarded(
        lambda: train(config),
        run_dir=config.run_dir,
        backend=parallel.backend,
        timeout_minutes=parallel.distributed_timeout_minutes,
    )
    raise SystemExit(code)


if __name__ == "__main__":  # dist_checkpointing spawns helpers that import this module again
    main()
