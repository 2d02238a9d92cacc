"""Do trainer and engine agree? Both are built as a run builds them, and score the same tokens."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_gspo.config import Config
from megatron_gspo.errors import show_bytes
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok, warning

_PROMPTS, _RESPONSE = 4, 32
# nats by which one token's log-prob may differ: float32 rounding is 1e-5, bfloat16 was measured up to 0.19
_LARGEST = {"float32": 1e-3, "bfloat16": 0.5}


def check_parity(config: Config) -> list[Finding]:
    """Assemble the run, send its weights to the engine and compare log-probs; a collective of all ranks.

    Nothing is written to run_dir but the logs of servers that the run would start. Raises UserError for all that would
    stop a run at its start.
    """
    from megatron_gspo.loop.setup import build_components
    from megatron_gspo.mcore.process_groups import shutdown

    if config.rollout.engine == "sft":
        return [
            note(
                "parity.log_probs",
                "rollout.engine = sft generates no samples whose log-probs could be compared",
            )
        ]
    with tempfile.TemporaryDirectory() as folder:
        data = replace(config.data, cache_dir=config.data.cache_dir or folder)  # its default is in run_dir
        run = build_components(_probing(replace(config, data=data)))
        try:
            return _compare(run)
        finally:
            run.close()
            shutdown(keep_distributed=True)


def _probing(config: Config) -> Config:
    """The same config with the probe of `loop/log_prob_check.py` on, which reports and doesn't stop."""
    if config.rollout.engine not in SERVER_KINDS:
        return config
    probing = replace(config.servers, log_prob_check_interval=1, log_prob_check_action="warn")
    sections: dict[str, Any] = {config.rollout.engine: probing}
    return replace(config, **sections)


def _compare(run) -> list[Finding]:  # type: ignore[no-untyped-def] # Run's module is imported late
    from megatron_gspo.loop.log_prob_check import check_log_probs
    from megatron_gspo.loop.timers import Timers

    run.groups.update_weights(run.weights, version=0)
    found = _memory()
    if run.config.rollout.engine in SERVER_KINDS:
        metrics = check_log_probs(run.groups, run.policy, run.prompts.prompts, run.config, 0, Timers())
        if not metrics:
            return [
                *found,
                error(
                    "parity.log_probs",
                    "no server scored the prompts",
                    "the log-probs were not compared",
                    "look at the servers' logs",
                ),
            ]
        mean, largest = metrics["log_prob_check/abs_diff"], metrics["log_prob_check/abs_diff_max"]
    else:
        mean, largest = _differences(run)
    return [judge_parity(mean, largest, run.config.rollout.engine, run.config.model.dtype), *found]


def _differences(run) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """(mean, largest) difference, in nats, between the log-probs that the embedded engine gives with its samples and
    the policy's own of the same tokens."""
    from megatron_gspo.config import SamplingParams
    from megatron_gspo.mcore.micro_batches import plan_of
    from megatron_gspo.mcore.train_step import compute_log_probs
    from megatron_gspo.rollout.sample_exchange import move_samples

    sampling = SamplingParams(1, min(_RESPONSE, run.config.rollout.max_response_length))
    groups, training = run.policy.groups, run.config.training
    batch = run.groups.generate(run.prompts.prompts[:_PROMPTS], sampling, seed=0)
    plan = plan_of(batch, training, run.policy.config, groups)
    shared = groups.pp, groups.cp, groups.tp
    batch = move_samples(batch, plan.replica_of(), groups.dp, shared, run.policy.routes)
    ours = compute_log_probs(run.policy, batch, training, temperature=1.0, plan=plan).log_probs
    differences = [np.abs(ours[i] - s.rollout_log_probs)[s.loss_mask] for i, s in batch.held.items()]
    total, count = batch.sum(sum(float(d.sum()) for d in differences), sum(map(len, differences)))
    return total / count, batch.max(max((float(d.max()) for d in differences if len(d)), default=0.0))[0]


def judge_parity(mean: float, largest: float, engine: str, dtype: str) -> Finding:
    """Differences of log-probs in nats; a NaN is no parity."""
    check, limit = "parity.log_probs", _LARGEST[dtype]
    text = (
        f"trainer and {engine} engine: log-probs differ by {mean:.2g} nats on average, {largest:.2g} at most ({dtype})"
    )
    if largest <= limit:
        return ok(check, text)
    fix = "compare model, dtype and tokenizer of both; docs/troubleshooting.md"
    if largest <= 10 * limit:
        return warning(check, text, f"{limit:g} is usual; importance ratios are off by as much", fix)
    return error(check, text, f"{limit:g} is usual; they don't compute the same model", fix)


def _memory() -> list[Finding]:
    """What the assembled run takes of the GPU before its first step."""
    import torch

    if not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    return [
        note(
            "parity.memory",
            f"{show_bytes(free)} of {show_bytes(total)} GPU memory are free once model, optimizer and engine are there",
            "activations and Adam's states, which come with the first step, need room",
        )
    ]
