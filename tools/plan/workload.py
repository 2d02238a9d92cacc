"""Workload and cluster of a plan, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gspo.config import LoRAConfig
from megatron_gspo.errors import InputError
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import Gpu

OWN_GPUS = ("sglang", "vllm")  # engines on GPUs of their own; they cost the same
ENGINES = (*OWN_GPUS, "colocated", "embedded", "none")


@dataclass(frozen=True)
class Workload:
    """One rollout batch and its training. Lengths in tokens; ``global_batch_size`` in sequences per optimizer step.

    reference: with a frozen reference policy. value_model: with one of the policy's size (PPO). routes: expert ids are
    replayed. lora: of the adapters, if they are what is trained; the reference is then the policy without them.
    """

    response_length: int
    prompt_length: int = 1024
    rollout_batch_size: int = 128
    n_samples: int = 8
    global_batch_size: int = 256
    reference: bool = False
    value_model: bool = False
    routes: bool = True
    dtype_bytes: int = 2
    implementation: str = "transformer_engine"
    lora: LoRAConfig | None = None

    @property
    def sequences(self) -> int:
        return self.rollout_batch_size * self.n_samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.response_length

    def mean_length(self, mean_response: float) -> float:
        """Tokens of a sequence on average."""
        return self.prompt_length + mean_response * self.response_length


@dataclass(frozen=True)
class Cluster:
    """Training and generation hardware.

    gpus: training GPUs. engine: ``sglang`` or ``vllm`` on ``engine_gpus`` further GPUs, ``colocated`` SGLang on the
    training GPUs, the ``embedded`` engine, or ``none``. engine_tensor: GPUs per engine.
    """

    gpu: Gpu
    gpus: int
    engine: str = "sglang"
    engine_gpus: int = 0
    engine_tensor: int = 1

    @property
    def serving(self) -> int:
        """GPUs that generate."""
        return self.engine_gpus if self.engine in OWN_GPUS else 0 if self.engine == "none" else self.gpus


@dataclass(frozen=True)
class PlanInputs:
    """What every estimate depends on besides the parallel layout."""

    shape: ModelShape
    work: Workload
    cluster: Cluster
    assume: Assumptions


def check_workload(work: Workload, longest_positions: int) -> None:
    """Raise ``InputError`` if the sizes contradict each other or the model."""
    for name in ("response_length", "prompt_length", "rollout_batch_size", "n_samples", "global_batch_size"):
        if (value := getattr(work, name)) < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: must be at least 1; give an integer above 0")
    if work.sequences % work.global_batch_size:
        raise InputError(
            f"--global-batch-size {work.global_batch_size}: does not divide the {work.sequences} sequences of a "
            "rollout batch (--rollout-batch-size x --n-samples); give a divisor"
        )
    if work.longest > longest_positions:
        raise InputError(
            f"--response-length {work.response_length}: with --prompt-length it makes {work.longest} tokens and the "
            f"model has {longest_positions} positions; keep the sum within them"
        )


def check_cluster(cluster: Cluster) -> None:
    """Raise ``InputError`` for partial nodes or engines."""
    node = cluster.gpu.node
    if cluster.gpus < 1 or (cluster.gpus > node and cluster.gpus % node):
        fix = max(cluster.gpus - cluster.gpus % node, 1)
        raise InputError(f"--gpus {cluster.gpus}: nodes have {node} GPUs; give 1 to {node} or a multiple, as {fix}")
    if cluster.engine in OWN_GPUS and cluster.engine_gpus < 1:
        raise InputError(f"--engine-gpus {cluster.engine_gpus}: engines need GPUs; give 1 or more, or --engine none")
    if cluster.engine in (*OWN_GPUS, "colocated") and (
        cluster.engine_tensor < 1 or cluster.serving % cluster.engine_tensor
    ):
        raise InputError(
            f"--engine-tensor {cluster.engine_tensor}: does not divide the {cluster.serving} GPUs of the engines; give "
            "a divisor"
        )
