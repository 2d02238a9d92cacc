"""From the hidden states to the last gradient of a step nothing of ours reads a value from the
device.

On a CPU every tensor is on the host, so the test follows what would be on a GPU: the parameters,
the batch behind its bounds, and all that is computed from them. Reading one of these back, or a
shape that depends on one, fails.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_gspo.algorithms import Objective, preset
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore import operators
from megatron_gspo.mcore.forward_step import policy_forward_step
from megatron_gspo.mcore.micro_batches import MicroBatches
from megatron_gspo.mcore.policy import Policy, build_policy
from megatron_gspo.mcore.train_step import pack_mini_batch, run_schedule
from tests.equivalence.cases import make_samples
from tests.support.configs import adam, micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.parallel_groups import groups_of
from tests.support.tiny_models import save_tiny_model

READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "is_nonzero",
}
PYTHON_READS = {Tensor.tolist, Tensor.numpy}  # of a CPU tensor: no operator is called
# How many tokens an expert gets is known on the device only. A loop over experts needs it; a
# grouped product doesn't.
LOOPS_OVER_EXPERTS = "gated_experts"
# Labels are checked on a CPU only; the branch tests the device first.
ON_A_CPU_ONLY = "_check_labels"
# It finds the positions to be scored in the masks of a batch before they are copied to the device.
BEFORE_THE_COPY = "parallel/scored_rows.py"


class Device(TorchDispatchMode):
    """Holds the storages that would be on a GPU and counts what our code, but for a function
    ``allowed``, reads.
    """

    def __init__(self, tensors: list[Tensor], allowed: str = "") -> None:
        super().__init__()
        self.allowed = allowed
        # Kept: no address comes twice.
        self.held = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self.reads: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(tensor.untyped_storage()._cdata in self.held for tensor in inputs)
        self.calls += there
        if there and self.waits(func, args):
            self.note(func)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out) if there else ():
            if isinstance(leaf, Tensor):
                self.held[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
        return out

    @staticmethod
    def waits(func: Any, args: Any) -> bool:
        name = func.overloadpacket.__name__
        if name in ("index", "index_put", "index_put_"):
            return any(i is not None and i.dtype == torch.bool for i in args[1])
        return name in READS

    def note(self, func: Any) -> None:
        """Record it, unless Megatron reads or the reading is one of the two that are known."""
        frames = [
            f
            for f in traceback.extract_stack()
            if "/torch/" not in f.filename and f.filename != __file__
        ]
        caller = frames[-1]
        if caller.filename.endswith(BEFORE_THE_COPY):
            return
        if "megatron/core" not in caller.filename and caller.name not in (
            ON_A_CPU_ONLY,
            self.allowed,
        ):
            self.reads.append(f"{func} in {caller.filename}:{caller.lineno}")


class Conversions(TorchFunctionMode):
    """Shows a watch the conversions to Python values that call no operator."""

    def __init__(self, watch: Device) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PYTHON_READS and args[0].untyped_storage()._cdata in self.watch.held:
            self.watch.note(func.__name__)
        return func(*args, **(kwargs or {}))


def run_step(policy: Policy, objective: Objective, batches: MicroBatches, watch: Device) -> None:
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    step = policy_forward_step(
        objective, num_microbatches=len(batches.batches), groups=policy.groups
    )
    with watch, Conversions(watch):
        run_schedule(policy, step, batches, forward_only=False)


def watched(rank: int, world_size: int, path: str, name: str, dtype: str) -> tuple[list[str], int]:
    if dtype == "bfloat16":  # as on a GPU
        operators.grouped_products_apply = lambda x, *widths: True
    policy = build_policy(
        model_config(path, dtype=dtype), parallel(), groups_of(parallel()), optimizer=adam(lr=1e-3)
    )
    objective = replace(preset(name), entropy_coef=0.01)
    samples = [
        replace(sample, old_log_probs=np.full(len(sample.loss_mask), -3.0, dtype=np.float32))
        for sample in make_samples(count=6)
    ]
    batches = pack_mini_batch(
        policy,
        TrainingBatch.of(samples),
        micro_batches_of(64),
        optional=("old_log_probs",),
        routing=None,
    )
    batches = replace(batches, batches=list(batches.batches))
    there = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    for batch in batches.batches:
        there += [
            x for x in vars(batch).values() if isinstance(x, Tensor) and x is not batch.cu_seqlens
        ]
    allowed = LOOPS_OVER_EXPERTS if dtype == "float32" else ""
    watch = Device([tensor.detach() for tensor in there], allowed)
    run_step(policy, objective, batches, watch)
    return watch.reads, watch.calls


@pytest.mark.parametrize(
    "kind, dtype", [("dense", "float32"), ("moe", "float32"), ("moe", "bfloat16")]
)
def test_a_step_reads_nothing_from_the_device(tmp_path, kind, dtype):
    path = save_tiny_model(tmp_path / "model", kind)
    ((reads, calls),) = run_distributed(watched, 1, path, "gspo", dtype)
    assert calls > 1000, "the step was not followed: this test shows nothing"
    assert reads == []
