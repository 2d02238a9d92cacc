"""The sections that describe the model, its layout and how it is trained.

Each default lives here and nowhere else. `--help` and docs/config.md are generated from these fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_gspo.config.base import Section


class ModelConfig(Section):
    path: str = Field(description="Hugging Face model directory (config.json, tokenizer, safetensors).")
    init: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="Weights to start from; random reads config.json only and draws them from seed.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Type of parameters and activations. Log-probs are always float32."
    )
    implementation: Literal["auto", "transformer_engine", "torch"] = Field(
        "auto",
        description="Layer modules; auto is Transformer Engine on a GPU where it is installed, else torch.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Activation recomputation: none, core attention only, or whole layers."
    )
    recompute_num_layers: int | None = Field(
        None, ge=1, description="Layers recomputed as one unit, with recompute: full; null is 1."
    )


class ParallelConfig(Section):
    tensor_model_parallel_size: int = Field(
        1, ge=1, description="Ranks that share each attention and dense layer (TP)."
    )
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages (PP).")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None,
        ge=2,
        description="Model chunks on each pipeline stage (interleaved schedule); null is the plain schedule.",
    )
    account_for_embedding_in_pipeline_split: bool = Field(
        False, description="Count the embedding as a layer when layers are split over pipeline stages."
    )
    account_for_loss_in_pipeline_split: bool = Field(
        False, description="Count the output layer and the loss as a layer when layers are split over pipeline stages."
    )
    context_parallel_size: int = Field(
        1, ge=1, description="Ranks that share the tokens of each sequence (CP)."
    )
    expert_model_parallel_size: int = Field(
        1, ge=1, description="Ranks that share the experts of a layer (EP)."
    )
    expert_tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        description="Ranks that share each single expert (ETP); null is 1, whole experts, whatever TP is.",
    )
    sequence_parallel: bool | None = Field(
        None, description="Split activations between TP regions along the tokens; null is on where TP > 1."
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="How tokens reach their experts."
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="torch.distributed backend; auto is nccl where there is a GPU, else gloo."
    )
    timeout_minutes: float = Field(
        30.0, gt=0, description="Time after which a collective that hangs fails, in minutes."
    )
    use_distributed_optimizer: bool = Field(
        True, description="Shard the optimizer state and float32 master weights over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = Field(False, description="Reduce gradients while the backward still runs.")
    overlap_param_gather: bool = Field(
        False, description="Gather updated parameters while the next forward runs; needs overlap_grad_reduce."
    )

    @property
    def use_sequence_parallel(self) -> bool:
        """Whether sequence parallelism is on, null resolved."""
        on = self.sequence_parallel
        return self.tensor_model_parallel_size > 1 if on is None else on

    @property
    def expert_tensor_size(self) -> int:
        """Expert-tensor-parallel size, null resolved."""
        return self.expert_tensor_parallel_size or 1

    @property
    def extra_pipeline_layers(self) -> int:
        """What is counted as a layer beside the model's when they are split over pipeline stages: 0, 1 or 2."""
        return int(self.account_for_embedding_in_pipeline_split) + int(self.account_for_loss_in_pipeline_split)

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one model replica: TP x PP x CP."""
        return (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among world_size ranks; Config.check has proved that it divides."""
        return world_size // self.model_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this: 2 x CP chunks, or 1 without CP."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """A packed micro-batch is padded to a multiple of this, so that CP x TP ranks hold equal parts."""
        scatter = self.tensor_model_parallel_size if self.use_sequence_parallel else 1
        return self.sequence_multiple * scatter


class TrainingConfig(Section):
    steps: int = Field(description="Rollout batches to train on.", ge=1)
    global_batch_size: int = Field(description="Sequences per optimizer step (a mini-batch).", ge=1)
    epochs: int = Field(1, ge=1, description="Passes over each rollout batch.")
    max_tokens_per_micro_batch: int = Field(
        8192, ge=1, description="Token budget of a packed micro-batch, before context parallelism splits it."
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="Sequences per micro-batch; null packs as many as the token budget holds."
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-6, gt=0, description="Peak learning rate of Adam.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear or cosine schedule.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps over which the rate rises from 0 to lr.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay; norms and biases have none.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Largest norm of the whole gradient; 0 does not clip.")


class EvaluationConfig(Section):
    interval: int = Field(0, ge=0, description="Evaluate after every so many steps; 0 is never in between.")
    at_start: bool = Field(
        True, description="Evaluate before the first step, where there are held-out prompts."
    )
    at_end: bool = Field(True, description="Evaluate after the last step, where there are held-out prompts.")
    n_samples: int = Field(1, ge=1, description="Responses per held-out prompt (the n of mean@n).")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 takes the likeliest token.")
    max_prompts: int | None = Field(
        None, ge=1, description="Use only the first so many held-out prompts; null is all."
    )
    pass_at_k: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="Report pass@k for each k, each at most n_samples."
    )


class CheckpointConfig(Section):
    interval: int = Field(0, ge=0, description="Save after every so many steps; 0 is never.")
    keep: int = Field(2, ge=1, description="Newest checkpoints kept; older ones are deleted.")
    asynchronous: bool = Field(
        True, description="Train on while a checkpoint is written, for a copy of it in host memory meanwhile."
    )
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto goes on from run_dir's newest checkpoint; never refuses a run_dir already used.",
    )
    export_hf: bool = Field(
        True, description="Write the trained model as a Hugging Face directory at the end."
    )


class TrackingConfig(Section):
    tensorboard: bool = Field(False, description="Write TensorBoard events to run_dir/tensorboard.")
    wandb: bool | str = Field(False, description="Log to Weights & Biases; true, or the name of the project.")
    mlflow: bool | str = Field(False, description="Log to MLflow; true, or the name of the experiment.")
    samples_per_step: int = Field(
        4, ge=0, description="Responses written to run_dir/samples after each step."
    )
    ratio_interval: int = Field(
        0, ge=0, description="Write importance ratios to run_dir/ratios after every so many steps; 0 is never."
    )
    time_split: bool = Field(
        False, description="Time forward, backward and optimizer apart; on a GPU each is waited for."
    )
    picture: bool = Field(
        True, description="Draw run_dir/curves.png at the end; skipped where matplotlib is absent."
    )
