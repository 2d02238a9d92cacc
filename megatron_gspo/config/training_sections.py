"""Sections `training`, `optimizer`, `guard`, `evaluation`, `checkpoint`, `tracking` and `profile`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.paths import UserPath


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the run and its batches."""

    steps: Annotated[int, Ge(1)]
    """Rollout batches to train on."""
    global_batch_size: Annotated[int, Ge(1)]
    """Sequences per optimizer step (mini-batch)."""
    ppo_epochs: Annotated[int, Ge(1)] = 1
    """Passes over each rollout batch."""
    max_tokens_per_micro_batch: Annotated[int, Ge(1)] = 8192
    """Tokens of a packed micro-batch, before the context-parallel split."""
    micro_batch_size: Annotated[int, Ge(1)] | None = None
    """Sequences per micro-batch; null packs as many as fit."""
    log_prob_memory_gib: Annotated[float, Gt(0)] | None = None
    """GiB for logits in the log-prob head; null keeps them where the GPU has free memory
    (docs/gpu.md).
    """

    only: Literal["rollout", "train"] | None = None
    """Half of the loop: generate, or train on `batches` (docs/profiling.md)."""
    batches: UserPath | None = None
    """Directory of scored rollout batches; null writes none."""

    @property
    def log_prob_bytes(self) -> int | None:
        """``log_prob_memory_gib`` in bytes."""
        return None if self.log_prob_memory_gib is None else int(self.log_prob_memory_gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam, or an optimizer of your own, and its learning-rate schedule."""

    lr: Annotated[float, Gt(0)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Ge(0)] = 0.0
    """Final learning rate."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up."""
    lr_warmup_steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: Annotated[float, Ge(0)] = 0.01
    """Decoupled weight decay, not applied to norms and biases."""
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Gt(0)] = 1e-8
    """Term added to Adam's denominator."""
    clip_grad: Annotated[float, Ge(0)] = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    function: UserPath | None = None
    """Import path of your optimizer (docs/extending.md); null is Adam."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `function`."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    """The value model of `algorithm.name: ppo`, which has an optimizer of its own."""

    path: UserPath | None = None
    """Directory of the initial weights; null is `model.path`."""
    lr: Annotated[float, Gt(0)] = 1e-5
    """Peak learning rate."""
    value_clip: Annotated[float, Gt(0)] | None = 0.5
    """Values that move further get no gradient; null is no limit."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """First steps, which train the value model alone."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Early warning of a collapse, from `effective_sample_size` and `mismatch/k3`
    (docs/collapse.md).
    """

    action: Literal["off", "warn", "stop"] = "warn"
    """`warn` prints a line (docs/collapse.md); `stop` also saves and ends the run."""
    effective_sample_size: Annotated[float, Gt(0), Lt(1)] | None = None
    """Lower values count; null is 0.5, or none where the objective bounds the weights."""
    mismatch_k3: Annotated[float, Gt(0)] = 0.1
    """Higher values of `mismatch/k3` count, in nats per token."""
    steps: Annotated[int, Ge(1)] = 3
    """Steps in a row that raise the alarm."""

    def for_algorithm(self, algorithm: AlgorithmConfig) -> GuardConfig:
        """The section with `effective_sample_size` resolved; None is no threshold."""
        if self.effective_sample_size is not None or algorithm.bounds_weights:
            return self
        return replace(self, effective_sample_size=0.5)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Accuracy on the held-out prompts."""

    eval_interval: Annotated[int, Ge(0)] = 0
    """Steps between evaluations; 0 is only at start and end."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    n_samples: Annotated[int, Ge(1)] = 1
    """Responses per held-out prompt."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Sampling temperature; 0 is greedy decoding."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Ge(0)] = 0
    """Most likely tokens to sample from; 0 is off."""
    max_prompts: Annotated[int, Ge(1)] | None = None
    """Held-out prompts to use; null is all."""
    pass_at_k: tuple[Annotated[int, Ge(1)], ...] = ()
    """Values of k for pass@k, each at most `n_samples`."""
    verifier: UserPath | None = None
    """Verifier of held-out responses, as `data.verifier`; null scores them as those of training."""
    verifier_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `verifier`."""
    verifier_timeout: Annotated[float, Gt(0)] | None = 10.0
    """Seconds per response for `verifier`, as `data.verifier_timeout`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and the export at the end."""

    save_interval: Annotated[int, Ge(0)] = 0
    """Steps between checkpoints; one follows the last step. 0 writes none."""
    keep: Annotated[int, Ge(1)] = 2
    """Newest checkpoints to keep."""
    async_save: bool = True
    """Write in the background (docs/resume.md)."""
    resume: Literal["auto", "never"] = "auto"
    """Resume from the newest checkpoint, or refuse a used `run_dir`."""
    export_hf: bool = True
    """Write the trained model to `run_dir`/hf."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is logged, and where."""

    tensorboard: bool = False
    """Write TensorBoard events to `run_dir`/tensorboard."""
    wandb: bool | str = False
    """Log to Weights & Biases; a string names the project."""
    mlflow: bool | str = False
    """Log to MLflow; a string names the experiment."""
    trackio: bool | str = False
    """Log to trackio; a string names the project."""
    swanlab: bool | str = False
    """Log to SwanLab; a string names the project."""
    samples_per_step: Annotated[int, Ge(0)] = 4
    """Responses written to `run_dir`/samples per step."""
    ratio_interval: Annotated[int, Ge(0)] = 0
    """Steps between files in `run_dir`/ratios; 0 writes none."""
    detailed_timers: bool = False
    """Time forward, backward and optimizer, which synchronises the GPU."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of printed and logged lines."""
    log_level_of_rank: dict[int, Literal["debug", "info", "warning", "error"]] = field(
        default_factory=dict
    )
    """Levels of single ranks, e.g. {3: debug}."""
    plot: bool = True
    """Plot `run_dir`/curves.png at the end."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Steps whose operations and memory are recorded (docs/profiling.md)."""

    steps: tuple[Annotated[int, Ge(1)], ...] = ()
    """Steps to record (docs/profiling.md)."""
    ranks: tuple[Annotated[int, Ge(0)], ...] = (0,)
    """Ranks that record these steps."""
