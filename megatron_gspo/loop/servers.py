"""An engine on servers, seen from all ranks: the first rank is their client, the others wait for its word.

Every call here is a collective. The first rank speaks at least every few seconds, so that the others' collectives don't
run into their timeout while a long response is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError, UserError, first_line
from megatron_gspo.loop.assemble import Run
from megatron_gspo.loop.engines import log_servers
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.rollout.engine_protocol import RolloutEngine
from megatron_gspo.rollout.sample_checks import check_samples
from megatron_gspo.rollout.sample_exchange import broadcast_samples
from megatron_gspo.rollout.server_engine.request_stream import RequestStream, WeightsNeeded
from megatron_gspo.rollout.server_engine.server_pool import NoServerError

_PATIENCE = 20.0  # seconds between two words of the first rank
_PAUSE = 1.0  # seconds before an update of the weights that no server took is tried again


def is_central(engine: RolloutEngine) -> bool:
    """Whether one rank generates for all (`ServerEngine`), where otherwise each generates a share."""
    return getattr(engine, "is_central", False)


def on_first(action: Callable[[], Any]) -> Any:
    """What `action` returns on the first rank, on every rank. Its failure is every rank's: a `UserError` stays one."""
    outcome: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            failure, outcome[1] = error, f"{type(error).__name__}: {first_line(error)}"
    dist.broadcast_object_list(outcome, src=0)
    if failure is not None:
        if isinstance(failure, (ValueError, OSError)) and not isinstance(failure, UserError):
            raise EngineError(f"the engine failed: {outcome[1]}") from failure
        raise failure
    if outcome[1]:
        raise EngineError(f"on the first rank: {outcome[1]}")
    return outcome[0]


def sync_weights(run: Run, version: int) -> None:
    """Give the engine the policy's weights, as often as it takes until a server has them.

    Raises `EngineError` on every rank after `sglang.recovery_timeout` seconds without one.
    """
    run.weights_version = version
    if not is_central(run.engine):
        run.engine.update_weights(run.policy.weights(), version=version)
        return
    patience = run.config.sglang.recovery_timeout
    end, said = time.monotonic() + patience, ""
    while True:
        stream, refusal = run.policy.weights(), ""
        try:
            run.engine.update_weights(stream, version=version)
        except NoServerError as error:
            refusal = str(error)
        except Exception as error:
            for _ in stream:  # the other ranks' part in it
                pass
            failure = error
            on_first(lambda failure=failure: _raise(failure))
        if not on_first(lambda refusal=refusal, news=refusal != said: refusal and _note(refusal, end, news)):
            return
        said = refusal
        while not on_first(lambda refusal=refusal: _is_back(run.engine, refusal, end)):
            pass


def _raise(error: Exception) -> None:
    raise error


def _note(refusal: str, end: float, news: bool) -> bool:
    """Say that no server took the weights, if it wasn't said; raises where there is no time for another try."""
    if time.monotonic() >= end:
        raise NoServerError(refusal)
    if news:
        log_servers(refusal)
    time.sleep(_PAUSE)
    return True


def _is_back(engine: Any, refusal: str, end: float) -> bool:
    """Whether a server answers, after some seconds at most; raises at the end of the time."""
    left = end - time.monotonic()
    if engine.wait_for_server(min(max(left, 0.0), _PATIENCE)):
        return True
    if left <= 0:
        raise NoServerError(refusal)
    return False


def generate(run: Run, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Sample]:
    """`RolloutEngine.generate` by the servers, on every rank."""
    held: list[Any] = [None, []]

    def begin() -> None:
        held[0] = run.engine.stream()
        held[1] = held[0].start(prompts, sampling, seed=seed)

    on_first(begin)
    groups: dict[int, list[Sample]] = {}
    while (missing := len(prompts) - len(groups)) > 0:
        groups |= _some(run, held[0], missing, None)
    samples: list[Sample] | None = None
    if dist.get_rank() == 0:
        samples = [sample for ticket in held[1] for sample in groups[ticket]]
    return _everywhere(run, samples, prompts, sampling)


def take(run: Run, stream: RequestStream | None, count: int, *, oldest: int | None) -> list[list[Sample]]:
    """`RequestStream.take` of the first rank's stream (None on the others), on every rank. oldest: see there."""
    groups: dict[int, list[Sample]] = {}
    while len(groups) < count:
        groups |= _some(run, stream, count - len(groups), oldest)
    samples: list[Sample] | None = None
    prompts: list[Prompt] = []
    n = run.sampling.n_samples_per_prompt
    if dist.get_rank() == 0:
        samples = [sample for ticket in sorted(groups) for sample in groups[ticket]]
        prompts = [run.source.prompts[sample.prompt_index] for sample in samples[::n]]
    drawn = _everywhere(run, samples, prompts, run.sampling)
    return [drawn[i : i + n] for i in range(0, len(drawn), n)]


def _everywhere(run: Run, samples: list[Sample] | None, prompts: Sequence[Prompt],
                sampling: SamplingParams) -> list[Sample]:
    """The first rank's samples, checked, on every rank."""
    vocabulary = run.policy.shape.vocab_size
    on_first(lambda: check_samples(samples, prompts, sampling, vocab_size=vocabulary))
    return broadcast_samples(samples, dist.group.WORLD, compute_device())


def _some(run: Run, stream: RequestStream | None, count: int, oldest: int | None) -> dict[int, list[Sample]]:
    """Up to `count` finished groups by ticket, after some seconds at most; the first rank has the samples, the others
    empty lists. Where no server has the weights, they are sent."""

    def attempt() -> tuple[bool, list[int]]:
        assert stream is not None
        try:
            per_step = run.config.rollout.rollout_batch_size
            found.update(stream.take_tickets(count, patience=_PATIENCE, oldest=oldest, per_step=per_step))
        except WeightsNeeded:
            return True, []
        return False, list(found)

    found: dict[int, list[Sample]] = {}
    wanted, tickets = on_first(attempt)
    if wanted:
        sync_weights(run, run.weights_version)
        return {}
    return found or {ticket: [] for ticket in tickets}


def server_counts(run: Run) -> dict[str, float]:
    """``rollout/*`` since the last call: what happened between the client and its servers; the first rank's."""
    counts = getattr(run.engine, "counts", None)
    return counts() if counts is not None else {}
