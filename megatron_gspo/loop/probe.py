"""Do both engines compute the same? Their log-probs of some prompts, compared after an update of the weights."""

from __future__ import annotations

import numpy as np
import torch.distributed as dist

from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.engines import log_servers
from megatron_gspo.loop.servers import is_central, on_first
from megatron_gspo.loop.timers import Timers
from megatron_gspo.mcore.train_step import compute_log_probs

_PROMPTS = 4


def probe(run: Run, version: int, timers: Timers) -> dict[str, float]:
    """``probe/*``, every ``sglang.log_prob_check_interval`` updates: the servers' log-probs of the first prompts'
    tokens against the policy's.

    Beyond ``sglang.log_prob_check_tolerance`` it warns or raises `EngineError` on every rank, which names server and
    difference.
    """
    sglang = run.config.sglang
    if not is_central(run.engine) or not sglang.log_prob_check_interval or version % sglang.log_prob_check_interval:
        return {}
    with timers("probe"):
        samples = [_as_sample(prompt) for prompt in run.source.prompts if prompt.length > 1][:_PROMPTS]
        ours = compute_log_probs(run.policy, samples, run.batching, temperature=1.0).log_probs
        return on_first(lambda: _compare(run, samples, ours, version))


def _as_sample(prompt: Prompt) -> Sample:
    """A prompt whose tokens but the first count as a response, so that they have log-probs."""
    return Sample(prompt.index, 0, prompt.token_ids, 1, np.ones(prompt.length - 1, dtype=bool), None, "stop")


def _compare(run: Run, samples: list[Sample], ours: list[np.ndarray], version: int) -> dict[str, float]:
    assert dist.get_rank() == 0
    sglang, worst, where, total, count = run.config.sglang, 0.0, "", 0.0, 0
    for url, theirs in run.engine.score([sample.tokens for sample in samples]).items():
        differences = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
        total, count = total + float(differences.sum()), count + differences.size
        if (largest := float(differences.max())) >= worst:
            worst, where = largest, url
    if not count:  # no server answered, which others report
        return {}
    if worst > sglang.log_prob_check_tolerance:
        line = (f"weights {version}: server {where} scores a token {worst:.3g} nats off the trainer, "
                f"sglang.log_prob_check_tolerance is {sglang.log_prob_check_tolerance:g}; compare model, dtype and "
                "weights of both")
        if sglang.log_prob_check_action == "stop":
            raise EngineError(line)
        log_servers(line)
    return {"probe/abs_diff": total / max(count, 1), "probe/abs_diff_max": worst}
