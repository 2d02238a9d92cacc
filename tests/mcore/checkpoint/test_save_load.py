"""Training checkpoints: exact in the layout that saved them, the same training in another one,
atomic.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import preset
from megatron_gspo.config import ParallelConfig
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.checkpoint.checkpoint_files import (
    CheckpointError,
    complete_checkpoints,
    read_state,
)
from megatron_gspo.mcore.checkpoint.read_pieces import MismatchError
from megatron_gspo.mcore.checkpoint.save_load import (
    _load_failure,
    begin_save,
    load_checkpoint,
    save_checkpoint,
)
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.train_step import finished_metrics, train_mini_batch
from tests.equivalence.cases import make_samples, max_difference
from tests.support.configs import micro_batches_of, parallel
from tests.support.distributed import run_distributed
from tests.support.saved_policies import LR, STATE, hold_writers, policy_in

LAYOUTS = [
    parallel(tensor=2),
    parallel(pipeline=2),
    parallel(pipeline=2, virtual_pipeline=2),
    parallel(tensor=2, expert=2),
    parallel(),
]


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in policy.weights()}


def train_step(policy: Policy, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One optimizer step on a mini-batch of its own; weights and metrics after it."""
    result = train_mini_batch(
        policy,
        TrainingBatch.of(make_samples(seed, count=4)),
        preset("sft"),
        micro_batches_of(64),
        temperature=1.0,
    )
    [metrics] = finished_metrics([result], policy)
    return weights(policy), metrics


def resume(policy: Policy, at: Path, *, spoil: bool) -> dict[str, Any]:
    """Load into a policy, optionally of another state; what came, and the step that follows."""
    if spoil:
        train_step(policy, seed=9)
        with torch.no_grad():
            for chunk in policy.chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(-2.0)
    state = load_checkpoint(policy, at)
    return {
        "state": state,
        "schedule": policy.scheduler.state_dict(),
        "weights": weights(policy),
        "next": train_step(policy, seed=1),
    }


def train_and_save(
    path: str, folder: str, layout: ParallelConfig, distributed_optimizer: bool
) -> tuple[Policy, dict[str, Any]]:
    """One step, a checkpoint, and the step that follows without interruption."""
    policy = policy_in(path, layout, distributed_optimizer=distributed_optimizer)
    saved, _ = train_step(policy, seed=0)
    at = save_checkpoint(policy, Path(folder), 1, STATE, keep=2)
    outcome = {
        "at": at,
        "weights": saved,
        "schedule": policy.scheduler.state_dict(),
        "next": train_step(policy, seed=1),
    }
    return policy, outcome


def save_then_resume(
    rank: int,
    world_size: int,
    path: str,
    folder: str,
    layout: ParallelConfig,
    others: list[ParallelConfig],
    distributed_optimizer: bool,
) -> dict[str, Any]:
    """Save in ``layout``; resume in the same policy, then in a fresh one of each other layout."""
    policy, outcome = train_and_save(path, folder, layout, distributed_optimizer)
    outcome["in place"] = resume(policy, outcome["at"], spoil=True)
    outcome["others"] = [
        resume(
            policy_in(path, other, distributed_optimizer=distributed_optimizer),
            outcome["at"],
            spoil=False,
        )
        for other in others
    ]
    return outcome if rank == 0 else {}


def resume_alone(rank: int, world_size: int, path: str, at: Path) -> dict[str, Any]:
    return resume(policy_in(path, parallel()), at, spoil=False)


def mean_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.stack([(a[name] - b[name]).abs().mean() for name in b]).mean())


def check_exact(outcome: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert resumed["state"] == {"step": 1, **STATE}
    assert resumed["schedule"] == outcome["schedule"]
    assert max_difference(resumed["weights"], outcome["weights"]) == 0
    assert max_difference(resumed["next"][0], outcome["next"][0]) == 0
    assert resumed["next"][1] == outcome["next"][1]


def check_same_training(outcome: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Weights exactly; the next step up to the order of float32 sums (see
    tests/equivalence/tolerances.py).
    """
    assert resumed["schedule"] == outcome["schedule"]
    assert max_difference(resumed["weights"], outcome["weights"]) == 0
    assert max_difference(resumed["next"][0], outcome["next"][0]) < LR / 2
    assert mean_difference(resumed["next"][0], outcome["next"][0]) < 1e-6
    for name, value in outcome["next"][1].items():
        assert resumed["next"][1][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    "layout", [parallel(tensor=2), parallel(pipeline=2, virtual_pipeline=2)], ids=["tp2", "vpp2"]
)
def test_resumes_exactly_and_in_other_layouts(path, tmp_path, layout):
    others = [other for other in LAYOUTS if other != layout]
    outcome = run_distributed(save_then_resume, 2, path, str(tmp_path), layout, others, True)[0]
    check_exact(outcome, outcome["in place"])
    for resumed in outcome["others"]:
        check_same_training(outcome, resumed)
    if layout == parallel(tensor=2):
        check_same_training(outcome, run_distributed(resume_alone, 1, path, outcome["at"])[0])


def test_resumes_without_the_distributed_optimizer(path, tmp_path):
    outcome = run_distributed(
        save_then_resume, 2, path, str(tmp_path), parallel(tensor=2), [], False
    )[0]
    check_exact(outcome, outcome["in place"])


def save_before_the_first_step(
    rank: int, world_size: int, path: str, folder: str
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What follows a save of an optimizer without a state, and a save with its memory after a step:
    without interruption, and resumed.
    """
    policy = policy_in(path, parallel(tensor=2))
    first = begin_save(policy, Path(folder), 0, {}, keep=2)
    pairs = [(first.finish(), train_step(policy, seed=0)[0])]
    second = begin_save(policy, Path(folder), 1, {}, keep=2, image=first.image)
    pairs.append((second.finish(), train_step(policy, seed=1)[0]))
    results = []
    for seed, (at, expected) in enumerate(pairs):
        resumed = policy_in(path, parallel(tensor=2))
        load_checkpoint(resumed, at)
        results.append((expected, train_step(resumed, seed=seed)[0]))
    return results


def test_an_optimizer_that_has_not_stepped_has_no_state(path, tmp_path):
    for expected, resumed in run_distributed(save_before_the_first_step, 2, path, str(tmp_path))[0]:
        assert max_difference(resumed, expected) == 0


def save_often(rank: int, world_size: int, path: str, folder: str) -> dict[str, Any]:
    """Three checkpoints of which two are kept, then one that cannot be encoded and one that the
    disk refuses.
    """
    target = Path(folder)
    policy = policy_in(path, parallel(tensor=2))
    train_step(policy, seed=0)
    for step in (1, 2, 10):
        save_checkpoint(policy, target, step, {"rank": world_size}, keep=2)
    kept = sorted(file.name for file in target.iterdir())
    errors = []
    with pytest.raises(RuntimeError) as caught:
        save_checkpoint(policy, target, 11, {"value": object()}, keep=2)
    errors.append(str(caught.value))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a full disk: writing fails with OSError.
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    with pytest.raises(RuntimeError) as caught:
        save_checkpoint(policy, target, 12, {}, keep=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors.append(str(caught.value))
    complete = [file.name for file in complete_checkpoints(target)]
    at = save_checkpoint(policy, target, 12, {"again": True}, keep=2)
    if rank == 0:
        metadata = at / ".metadata"
        metadata.write_bytes(bytes(metadata.stat().st_size))  # the same size
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(policy, at)
    errors.append(str(caught.value))
    return {"kept": kept, "errors": errors, "complete": complete}


def test_keeps_the_newest_and_survives_failures(path, tmp_path):
    results = run_distributed(save_often, 2, path, str(tmp_path))
    for outcome in results:  # a failure on one rank, the first, is every rank's
        assert "is not JSON serializable" in outcome["errors"][0]
        assert "File too large" in outcome["errors"][1] and "\n" not in outcome["errors"][1]
        assert (
            f"{tmp_path}/step_000012 can't be loaded (" in outcome["errors"][2]
            and "\n" not in outcome["errors"][2]
        )
        assert "to resume from the one before, move it away" in outcome["errors"][2]
        assert outcome["complete"] == ["step_000002", "step_000010"]
    assert results[0]["kept"] == ["step_000002", "step_000010"]
    assert [file.name for file in complete_checkpoints(tmp_path)] == ["step_000010", "step_000012"]
    assert read_state(tmp_path / "step_000012") == {"step": 12, "again": True}


def test_a_checkpoint_of_another_model_is_not_called_damaged():
    """Moving it away, as for a damaged one, would lose the run."""

    def misfit() -> None:
        raise MismatchError("decoder.weight is [64, 32] there and [32, 32] in the model")

    said = _load_failure(Path("checkpoints/step_000004"), misfit)
    assert (
        "is of another model or algorithm than this config's (decoder.weight is [64, 32] there"
        in said
    )
    assert said.endswith(
        "; set model, algorithm, lora and optimizer.function as they were, or choose another run_dir"
    )


def train_while_saving(
    rank: int, world_size: int, path: str, folder: str, distributed_optimizer: bool
) -> dict[str, Any]:
    """Two steps while the writers of a checkpoint are held up; what a fresh policy then finds
    in it.
    """
    policy = policy_in(path, parallel(tensor=2), distributed_optimizer=distributed_optimizer)
    saved, _ = train_step(policy, seed=0)
    release = hold_writers()
    state = {"list": [1]}
    save = begin_save(policy, Path(folder), 1, state, keep=2)
    state["list"].append(2)
    outcome = {
        "weights": saved,
        "schedule": policy.scheduler.state_dict(),
        "next": train_step(policy, seed=1),
    }
    last = train_step(policy, seed=2)
    whole = save.poll()
    meanwhile = (whole, complete_checkpoints(Path(folder)), save.path.is_dir())
    release()
    at = save.finish()
    loaded = policy_in(path, parallel(tensor=2), distributed_optimizer=distributed_optimizer)
    outcome["resumed"] = resume(loaded, at, spoil=False)
    outcome["later"] = max_difference(train_step(loaded, seed=2)[0], last[0])
    return outcome | {"meanwhile": meanwhile, "again": save.poll(), "at": at}


@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["sharded", "whole"])
def test_a_save_holds_what_was_there_when_it_began(path, tmp_path, distributed_optimizer):
    """Also of tensors that Megatron doesn't stage: without the distributed optimizer Adam's
    moments are their own.
    """
    for outcome in run_distributed(
        train_while_saving, 2, path, str(tmp_path), distributed_optimizer
    ):
        assert outcome["meanwhile"] == (False, [], True)
        assert outcome["at"] == tmp_path / "step_000001" and outcome["again"]
        resumed = outcome["resumed"]
        assert resumed["state"] == {"step": 1, "list": [1]}
        assert resumed["schedule"] == outcome["schedule"]
        assert max_difference(resumed["weights"], outcome["weights"]) == 0
        assert max_difference(resumed["next"][0], outcome["next"][0]) == 0 == outcome["later"]


def fail_on_one_rank(rank: int, world_size: int, path: str, folder: str) -> list[str]:
    """A rank that can't write, then what rank 0 alone writes; the next save succeeds."""
    target = Path(folder)
    errors = []
    policy = policy_in(path, parallel(tensor=2))
    save_checkpoint(policy, target, 2, {}, keep=1)
    save = begin_save(policy, target, 3, {}, keep=1)
    save.finish()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(policy, target, 4, {}, keep=1)
    errors.append(str(caught.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save = begin_save(policy, target, 5, {}, keep=1)
    for name in (".metadata", ".metadata.tmp"):
        (save.path / name).mkdir(exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        save.finish()
    errors.append(str(caught.value))
    complete = [file.name for file in complete_checkpoints(target)]
    return [*errors, str(complete), save_checkpoint(policy, target, 6, {}, keep=1).name]


def test_a_failure_of_one_rank_ends_the_save_on_every_rank(path, tmp_path):
    for first, second, complete, name in run_distributed(fail_on_one_rank, 2, path, str(tmp_path)):
        assert first.startswith(
            "checkpoint not written; the last one is untouched: OSError: [Errno 27] File too large"
        )
        assert " free, the last one takes " in first and "\n" not in first + second
        assert "Is a directory" in second
        assert complete == "['step_000003']" and name == "step_000006"


def abandon(rank: int, world_size: int, path: str, folder: str) -> list[str]:
    """A save that is ended while its writer is held up, and one after it."""
    policy = policy_in(path, parallel(tensor=2))
    release = hold_writers()
    save = begin_save(policy, Path(folder), 1, {}, keep=1)
    threading.Timer(0.2, release).start()
    save.end()
    torch.distributed.barrier()
    save_checkpoint(policy, Path(folder), 2, {}, keep=1)
    return sorted(file.name for file in Path(folder).iterdir())


def test_an_abandoned_save_leaves_nothing(path, tmp_path):
    assert run_distributed(abandon, 2, path, str(tmp_path)) == [["step_000002"]] * 2
