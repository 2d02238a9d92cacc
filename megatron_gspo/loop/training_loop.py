"""The training loop: `train` runs a config, `train_step` one rollout batch of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from megatron_gspo.algorithms import RatioHistogram
from megatron_gspo.config import Config
from megatron_gspo.data.sample_batch import SampleBatch
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.errors import EngineError
from megatron_gspo.launch_environment import world_size
from megatron_gspo.loop.advantages import with_advantages
from megatron_gspo.loop.callbacks import Callbacks, StoppedRun, add_metrics, load_callbacks
from megatron_gspo.loop.checkpoints import CheckpointManager, LoopState, resume
from megatron_gspo.loop.collapse_guard import collapse_guard
from megatron_gspo.loop.critic import run_critic_steps, with_values
from megatron_gspo.loop.distillation import with_teacher_advantages, with_teacher_scores
from megatron_gspo.loop.engines import generation_gpus, perturb_rollout, rollout_selections
from megatron_gspo.loop.evaluation import evaluate, is_evaluation_due
from megatron_gspo.loop.generation import DataCursor, RolloutGenerator
from megatron_gspo.loop.hf_export import export, export_adapters
from megatron_gspo.loop.log_prob_check import check_log_probs
from megatron_gspo.loop.log_probs import with_log_probs
from megatron_gspo.loop.loss_masking import mask_samples
from megatron_gspo.loop.metrics_logging import MetricsLogger
from megatron_gspo.loop.optimizer_steps import Update, run_optimizer_steps
from megatron_gspo.loop.profiling import Profiler, out_of_memory_explained
from megatron_gspo.loop.rank_log import rank_log
from megatron_gspo.loop.ratio_quantiles import quantiles_over_ranks
from megatron_gspo.loop.rollout_cache import RolloutCache
from megatron_gspo.loop.rollout_correction import correct_mismatch
from megatron_gspo.loop.routing import RoutingReplay, same_routers
from megatron_gspo.loop.run_lines import end_lines, start_lines
from megatron_gspo.loop.run_lock import sole_writer
from megatron_gspo.loop.sample_flops import SampleFlops, sample_flops
from megatron_gspo.loop.sample_metrics import (
    agent_metrics,
    sample_metrics,
    source_metrics,
)
from megatron_gspo.loop.setup import Components, build_components
from megatron_gspo.loop.step_plan import plan_step
from megatron_gspo.loop.stop_signal import stop_on_signal
from megatron_gspo.loop.throughput import (
    StepWork,
    gpu_peak,
    missing_peak_line,
    step_work,
    throughput,
)
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.micro_batches import packing_rules
from megatron_gspo.mcore.process_groups import shutdown
from megatron_gspo.mcore.seeding import EVALUATION, ROLLOUT, UPDATE, seed_generators
from megatron_gspo.mcore.user_optimizer import check_user_optimizers
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.rewards.verifiers import VerifierError
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_exchange import move_samples, replica_homes


def train(config: Config, *, engine: RolloutEngine | None = None) -> LoopState:
    """The whole run: see `megatron_gspo.train.train`."""
    keep_distributed = dist.is_initialized()
    config.check(world_size())
    check_user_optimizers(config)
    callbacks = load_callbacks(config, collapse_guard(config))
    with ExitStack() as stack:
        stack.enter_context(rank_log(config))
        stop_requested = stack.enter_context(stop_on_signal())
        run = build_components(config, engine=engine)
        stack.callback(shutdown, keep_distributed=keep_distributed)
        stack.enter_context(run)
        stack.enter_context(out_of_memory_explained(run.policy, config.run_dir))
        profiler = Profiler(config.profile, config.run_dir)
        stack.enter_context(profiler.on_signal())
        stack.enter_context(sole_writer(config.run_dir))
        state, checkpoint = resume(run.policy, config)
        logger = stack.enter_context(
            MetricsLogger(config, run.prompts.prompts, run.tokenizer, resume_step=state.step)
        )
        logger.info_lines(lambda: _start_lines(run))
        logger.note_dropped_prompts(run.dropped_prompts)
        checkpoints = stack.enter_context(
            CheckpointManager(run.policy, config.checkpoint, config.run_dir, checkpoint)
        )
        trains = config.training.only != "rollout"
        timers = Timers()
        started = time.monotonic() - state.wall_seconds
        state = _prepare_start(run, state, logger, timers, callbacks)
        while state.step < config.training.steps:
            with profiler.step(state.step + 1):
                trained = train_step(run, state, checkpoints, timers, callbacks)
                state = state.after_step(trained.cursor, len(trained.batch), trained.work.tokens)
                metrics, failure = _prepare_next(run, state.step, timers)
            accuracy = metrics.get("eval/accuracy", state.accuracy_after)
            metrics |= trained.metrics
            requests = callbacks.after_step(
                state.step, add_metrics(metrics, trained.callback_metrics)
            )
            state = replace(
                state,
                wall_seconds=time.monotonic() - started,
                accuracy_after=accuracy,
                callbacks=callbacks.state(),
            )
            spans = timers.spans
            record = metrics | throughput(
                trained.work,
                timers.read_and_reset(),
                metrics,
                peak=gpu_peak(config),
                generation_gpus=generation_gpus(config),
            )
            record = add_metrics(record, trained.callback_metrics)
            record = add_metrics(
                record, {name: request.metrics for name, request in requests.items()}
            )
            logger.log(state.step, record)
            for name, request in requests.items():
                if request.warning:
                    logger.warn_once(name, request.warning)
            logger.write_step(
                state.step, trained.batch, trained.routing, trained.update, trained.cursor, spans
            )
            with checkpoints.saved_on_failure(state):
                if failure is not None:  # raised after the step is logged
                    raise failure
            stopping = next((request for request in requests.values() if request.stop), None)
            stops = stop_requested() or stopping is not None
            is_due = checkpoints.is_due(state.step, config.training.steps)
            if trains and (stops or is_due):
                # Logged with the next step: a step is logged before it is saved.
                with timers("checkpoint"):
                    checkpoints.begin(state)
            if stops and state.step < config.training.steps:
                checkpoints.finish()
                resumes = "start again to go on after the batches that are written"
                if trains:
                    resumes = f"start again to resume from {checkpoints.current}"
                if stopping is not None:
                    raise StoppedRun(f"{stopping.stop}; {resumes}{stopping.resume_hint}")
                logger.info(f"stopped by SIGUSR1 after step {state.step}; {resumes}")
                return state
        checkpoints.finish()
        state = replace(state, wall_seconds=time.monotonic() - started)
        callbacks.end(state)
        exports = config.checkpoint.export_hf and trains
        exported = export(run.policy, Path(config.run_dir) / "hf") if exports else None
        if run.policy.trained_lora is not None and exports:
            export_adapters(run.policy, Path(config.run_dir) / "adapters")
        if run.policy.critic is not None and exports:
            export(run.policy.critic, Path(config.run_dir) / "critic_hf")
        logger.finish(asdict(state) | {"exported": exported and str(exported)})
        logger.info_lines(lambda: end_lines(config, state, held_out=len(run.eval_prompts)))
    return state


@dataclass(frozen=True)
class TrainedStep:
    """A rollout batch after its optimizer steps, on the replicas, and the position in the
    prompts after it.
    """

    batch: TrainingBatch
    cursor: DataCursor
    routing: RoutingReplay
    update: Update
    work: StepWork
    metrics: dict[str, float]
    callback_metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def train_step(
    run: Components,
    state: LoopState,
    checkpoints: CheckpointManager,
    timers: Timers,
    callbacks: Callbacks | None = None,
) -> TrainedStep:
    """One rollout batch: groups with rewards, log-probs, advantages, optimizer steps."""
    config = run.config
    step = state.step
    generator = RolloutGenerator(run.groups, run.prompts, run.rewards, config)
    cache = RolloutCache(config, run.prompts.prompts, run.groups.engine_name)
    routing = RoutingReplay(
        config.routing,
        run.policy.routes,
        config.algorithm.has_ratio,
        run.perturbation,
        seed=config.seed,
        step=step,
        same_routers=same_routers(config),
        selected_positions=run.policy.shape.selected_positions,
    )
    seed_generators(config.seed, step, ROLLOUT)
    with checkpoints.saved_on_failure(state):
        rollout = cache.of_step(
            step, checkpoints.current, lambda: generator.draw(step, state.data_cursor, timers)
        )
        cursor = rollout.cursor
        if config.training.only is None:
            cursor = generator.prepare_for_training(step, cursor)
    routing.rollout_selections = rollout_selections(run.engine)
    callback_metrics = callbacks.after_rollout(step, rollout.batch) if callbacks else {}
    seed_generators(config.seed, step, UPDATE)
    groups = run.policy.groups
    rules = packing_rules(config.training, run.policy.config, groups)
    homes = replica_homes(rollout.batch, groups.dp)
    policy_flops = _sample_flops(run, rollout.batch, run.policy.shape)
    critic_flops = None
    if run.policy.critic is not None:
        critic_flops = _sample_flops(run, rollout.batch, run.policy.critic.shape)
    plan = plan_step(rollout.batch, homes, config, rules, step, costs=policy_flops.costs)
    routing.check_rollout_routes(rollout.batch)
    with timers("exchange"):
        batch = move_samples(rollout.batch, plan.replica, groups, routes=routing.shape)
    if config.training.only == "rollout":
        metrics = rollout.metrics | _rollout_metrics(run, batch, step)
        work = step_work(
            batch, policy_flops, config, plan, updates_policy=False, critic=critic_flops
        )
        return TrainedStep(batch, cursor, routing, Update({}), work, metrics, callback_metrics)
    ratios: dict[str, RatioHistogram] = {}  # whose quantiles are taken together
    batch, score_metrics = with_log_probs(
        batch, run.policy, run.reference, config, plan, routing, timers, ratios
    )
    teacher_states = None
    if run.teachers is not None:
        with checkpoints.saved_on_failure(state):
            batch, teacher_states = with_teacher_scores(batch, run.teachers, plan, timers)
    batch, mask_metrics = mask_samples(
        batch, step=step, truncated=config.algorithm.truncated == "mask"
    )
    if run.policy.critic is not None:
        batch = with_values(batch, run.policy.critic, config, plan, timers)
    batch = with_advantages(
        batch, config.algorithm, max_response_length=config.rollout.max_response_length
    )
    if run.teachers is not None:
        batch, teacher_metrics = with_teacher_advantages(batch, config.distillation, run.teachers)
        score_metrics |= teacher_metrics
    batch, correction_metrics = correct_mismatch(batch, config.algorithm)
    metrics = rollout.metrics | score_metrics | mask_metrics | correction_metrics
    metrics |= _rollout_metrics(run, batch, step)
    checkpoints.poll(timers)  # most of a step's time has passed
    checkpoints.weights_change()
    update = Update({"updates": 0.0, "updates/skipped": 0.0})
    if run.policy.critic is not None:
        metrics |= run_critic_steps(run.policy.critic, batch, config, step, plan, timers)
    updates_policy = run.policy.critic is None or step >= config.critic.warmup_steps
    if updates_policy:
        update = run_optimizer_steps(
            run.policy, batch, config, step, plan, routing, timers, ratios, teacher_states
        )
    routing.measure_passes(timers)
    metrics |= update.metrics | quantiles_over_ranks(ratios, batch) | routing.measured.metrics()
    work = step_work(
        batch, policy_flops, config, plan, updates_policy=updates_policy, critic=critic_flops
    )
    return TrainedStep(batch, cursor, routing, update, work, metrics, callback_metrics)


def _sample_flops(run: Components, batch: SampleBatch, shape: ModelShape) -> SampleFlops:
    return sample_flops(
        batch,
        shape,
        frozen=run.config.lora.is_on,
        recompute=run.config.model.recompute_granularity,
    )


def _rollout_metrics(run: Components, batch: TrainingBatch, step: int) -> dict[str, float]:
    config = run.config
    metrics = sample_metrics(batch, version=step, supervised=config.algorithm.is_supervised)
    metrics |= source_metrics(batch.table, run.prompts.prompts)
    if config.samples_are_runs:
        metrics |= agent_metrics(batch)
    return metrics


def _start_lines(run: Components) -> list[str]:
    data = run.config.data
    verifier = ", ".join(data.verifiers)
    if run.config.samples_are_runs:
        verifier = data.verifier or run.config.player
    lines = start_lines(
        run.config,
        prompts=len(run.prompts.prompts),
        held_out=len(run.eval_prompts),
        verifier=verifier,
    )
    missing_peak = missing_peak_line(run.config)
    return lines if missing_peak is None else [*lines, missing_peak]


def _prepare_start(
    run: Components,
    state: LoopState,
    logger: MetricsLogger,
    timers: Timers,
    callbacks: Callbacks,
) -> LoopState:
    """Send the weights to the engine, start the callbacks, begin to perturb the engine's routers if
    configured, and evaluate them at the start of a new run. Prints what the verifiers say of
    themselves, and that no step is left where none is.
    """
    for description in dict.fromkeys([run.rewards.description, run.eval_rewards.description]):
        if description is not None:
            logger.info(description)
    if state.step >= run.config.training.steps:
        logger.info(
            f"{run.config.run_dir} is trained: it is at step {state.step}, training.steps is "
            f"{run.config.training.steps}; more steps continue it, another run_dir begins a new run"
        )
    checked: dict[str, float] = {}
    if run.trains_on_rollouts:
        run.groups.update_weights(run.weights, version=state.step)
        checked = check_log_probs(
            run.groups,
            run.policy,
            run.prompts.prompts,
            run.config,
            state.step,
            timers,
            at_start=True,
        )
    callbacks.start(run, state)
    if run.perturbation is not None:
        perturb_rollout(run.engine, run.perturbation)
    if state.step or not run.eval_prompts or not run.config.evaluation.at_start:
        return state
    metrics = _evaluate(run, 0, timers)
    logger.log(0, metrics | checked | timers.read_and_reset())
    return replace(
        state, accuracy_before=metrics["eval/accuracy"], accuracy_after=metrics["eval/accuracy"]
    )


def _prepare_next(
    run: Components, step: int, timers: Timers
) -> tuple[dict[str, float], EngineError | VerifierError | None]:
    """Send the new weights to the engine, and evaluate them if that is due: the metrics, or the
    error of the engine or the verifier.
    """
    metrics: dict[str, float] = {}
    try:
        if run.trains_on_rollouts:
            with timers("weight_sync"):
                run.groups.update_weights(run.weights, version=step)
            metrics |= check_log_probs(
                run.groups, run.policy, run.prompts.prompts, run.config, step, timers
            )
            metrics |= run.groups.metrics()
        if run.eval_prompts and is_evaluation_due(run.config, step):
            metrics |= _evaluate(run, step, timers)
    except (EngineError, VerifierError) as error:
        return {}, error
    return metrics, None


def _evaluate(run: Components, version: int, timers: Timers) -> dict[str, float]:
    assert run.eval_groups is not None
    seed_generators(run.config.seed, version, EVALUATION)
    if not run.trains_on_rollouts:  # the held-out samples are the engine's only ones
        with timers("weight_sync"):
            run.eval_groups.update_weights(run.weights, version=version)
    return evaluate(run.eval_groups, run.eval_rewards, run.eval_prompts, run.config, timers)
