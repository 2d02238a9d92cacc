"""``--probe``: the run is built, its weights are sent to the servers, and both score the same tokens."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from megatron_gspo.config import Config
from megatron_gspo.rollout.server_kinds import SERVER_KINDS
from megatron_gspo.tools.doctor.findings import Finding, error, note, ok, warning

# nats by which one token's log-prob may differ: float32 rounding is 1e-5, bfloat16 was measured up to 0.19
_LARGEST = {"float32": 1e-3, "bfloat16": 0.5}


def probe_servers(config: Config) -> list[Finding]:
    """The check of ``loop/log_prob_check.py`` before a run; a collective of all ranks.

    Nothing is written to run_dir but the logs of servers that the run would start. Raises UserError for all that would
    stop a run at its start.
    """
    from megatron_gspo.loop.log_prob_check import check_log_probs
    from megatron_gspo.loop.setup import build_components
    from megatron_gspo.loop.timers import Timers
    from megatron_gspo.mcore.process_groups import shutdown

    engine = config.rollout.engine
    if engine not in SERVER_KINDS:
        return [note("parity.log_probs", f"rollout.engine = {engine} has no servers to compare")]
    probing = replace(config.servers, log_prob_check_interval=1, log_prob_check_action="warn")
    sections: dict[str, Any] = {engine: probing}
    with tempfile.TemporaryDirectory() as folder:
        data = replace(
            config.data, cache_dir=config.data.cache_dir or folder
        )  # its default is in run_dir
        run = build_components(replace(config, data=data, **sections))
        try:
            run.groups.update_weights(run.weights, version=0)
            metrics = check_log_probs(
                run.groups, run.policy, run.prompts.prompts, run.config, 0, Timers()
            )
        finally:
            run.close()
            shutdown(keep_distributed=True)
    if not metrics:
        what, why = "no server scored the prompts", "the log-probs were not compared"
        return [error("parity.log_probs", what, why, "look at the servers' logs")]
    mean, largest = metrics["log_prob_check/abs_diff"], metrics["log_prob_check/abs_diff_max"]
    return [judge_parity(mean, largest, engine, config.model.dtype)]


def judge_parity(mean: float, largest: float, engine: str, dtype: str) -> Finding:
    """Differences of log-probs in nats; a NaN is no parity."""
    check, limit = "parity.log_probs", _LARGEST[dtype]
    text = (
        f"trainer and {engine} servers: log-probs differ by {mean:.2g} nats on average, "
        f"{largest:.2g} at most ({dtype})"
    )
    if largest <= limit:
        return ok(check, text)
    fix = "compare model, dtype and tokenizer of both; docs/troubleshooting.md"
    if largest <= 10 * limit:
        return warning(
            check, text, f"{limit:g} is usual; importance ratios are off by as much", fix
        )
    return error(check, text, f"{limit:g} is usual; they don't compute the same model", fix)
