"""The sections that describe what is learnt from: objective, prompts, verifiers and rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from megatron_gspo.config.base import Section

if TYPE_CHECKING:
    from megatron_gspo.algorithms import Objective

OBJECTIVE_KEYS = (
    "importance_sampling_level",
    "loss_agg_mode",
    "epsilon_low",
    "epsilon_high",
    "dual_clip",
    "kl_loss_coef",
    "kl_loss_type",
    "entropy_coef",
    "advantage_std",
    "advantage_baseline",
    "loss_scale_factor",
    "allow_nonstandard",
)


class AlgorithmConfig(Section):
    name: Literal["gspo", "gspo_token", "grpo", "dr_grpo", "dapo", "sft"] = Field(
        "gspo", description="Preset of the objective; every null below keeps the preset's value."
    )
    importance_sampling_level: Literal["token", "sequence", "sequence_token", "none"] | None = Field(
        None, description="What one importance ratio spans."
    )
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"] | None = Field(
        None, description="How token losses become one number."
    )
    epsilon_low: float | None = Field(None, gt=0, le=1, description="Clip range below 1.")
    epsilon_high: float | None = Field(None, gt=0, description="Clip range above 1.")
    dual_clip: float | None = Field(
        None, gt=1, description="Bound on the ratio where the advantage is negative."
    )
    kl_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the KL to the reference in the loss; the reference is the starting weights.",
    )
    kl_reward_coef: float | None = Field(
        None, ge=0, description="Weight of the KL to the reference in the reward; null is 0."
    )
    kl_loss_type: Literal["k1", "k2", "k3"] | None = Field(None, description="Estimator of that KL.")
    entropy_coef: float | None = Field(None, ge=0, description="Weight of the entropy bonus.")
    advantage_std: Literal["sample", "population", "none"] | None = Field(
        None, description="Standard deviation that a group's rewards are divided by."
    )
    advantage_baseline: Literal["mean", "leave_one_out"] | None = Field(
        None, description="What is subtracted from a reward: its group's mean, or the mean of the others."
    )
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        description="Divisor in tokens of loss_agg_mode: seq-mean-token-sum-norm; null is rollout.max_response_length.",
    )
    allow_nonstandard: bool | None = Field(
        None, description="Allow a combination that is another algorithm than its name says."
    )
    old_log_probs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="Log-probs of the old policy: a pass of the training engine, or the rollout engine's.",
    )
    rollout_correction: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Importance weights old policy / rollout engine on the advantages, by token or by sequence "
        "(length-normalised), truncated at the cap.",
    )
    rollout_correction_cap: float = Field(2.0, ge=1, description="Largest weight of rollout_correction.")
    rollout_mask: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Take out of the loss what the two engines score too differently: tokens, or whole sequences by "
        "their length-normalised ratio old policy / rollout engine.",
    )
    rollout_mask_low: float | None = Field(
        None, gt=0, le=1, description="Smallest ratio that rollout_mask keeps; null is 1 / rollout_mask_high."
    )
    rollout_mask_high: float | None = Field(
        None, ge=1, description="Largest ratio that it keeps; null is 2 by token, by sequence it must be set."
    )
    turn_discount: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Advantages of an episode by turn: the rewards to go from it, each counting this much less a turn, "
        "against the same turn of the group's episodes; null: one advantage, of the summed rewards.",
    )
    zero_variance_groups: Literal["keep", "refill"] = Field(
        "keep",
        description="Groups whose rewards are all equal: keep (advantage 0), or sample others instead.",
    )
    max_refills: int = Field(
        3, ge=1, description="Most extra rollouts per step with zero_variance_groups: refill."
    )
    truncated: Literal["keep", "mask", "penalize"] = Field(
        "keep",
        description="Responses cut at the length limit: keep, take out of the loss, or DAPO's penalty.",
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="With truncated: penalize, the last tokens over which the penalty grows.",
    )
    overlong_penalty_factor: float = Field(
        1.0, gt=0, description="Penalty at the length limit, taken off the reward."
    )

    def objective(self, longest_response: int | None = None) -> Objective:
        """The typed objective; raises ValueError where the overrides contradict the preset's name. A missing
        loss_scale_factor becomes ``longest_response`` where the aggregation has one."""
        from megatron_gspo.algorithms import preset

        chosen = {key: getattr(self, key) for key in OBJECTIVE_KEYS}
        found = preset(self.name, **{key: value for key, value in chosen.items() if value is not None})
        if found.loss_agg_mode == "seq-mean-token-sum-norm" and found.loss_scale_factor is None:
            found = replace(found, loss_scale_factor=longest_response)
        return found

    @property
    def rollout_mask_band(self) -> tuple[float, float]:
        """(smallest, largest) ratio that rollout_mask keeps, nulls resolved."""
        high = self.rollout_mask_high or 2.0
        return self.rollout_mask_low or 1 / high, high

    @property
    def is_supervised(self) -> bool:
        return self.name == "sft"

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for ref_log_probs: those of the weights that the run started from."""
        return bool(self.kl_loss_coef) or bool(self.kl_reward_coef)


class TaskConfig(Section):
    name: str = Field(description="reasoning-gym dataset, e.g. chain_sum.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Its own settings, e.g. {min_terms: 2}.")
    size: int = Field(10_000, ge=1, description="Training prompts.")
    eval_size: int = Field(256, ge=0, description="Held-out prompts; none of them is a training prompt.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")


class DataConfig(Section):
    prompts: str | None = Field(
        None, description="Training prompts: .jsonl, .parquet or a datasets directory."
    )
    task: TaskConfig | None = Field(None, description="A reasoning-gym task, in place of prompts.")
    eval_prompts: str | None = Field(None, description="Held-out prompts; null takes the task's own.")
    prompt_key: str = Field(
        "prompt", description="Field with the question: text, or a list of chat messages."
    )
    answer_key: str | None = Field(
        "answer", description="Field with the reference answer; null where the verifier needs none."
    )
    chat_template: bool = Field(False, description="Wrap prompts in the tokenizer's chat template.")
    system_prompt: str | None = Field(None, description="System message; needs chat_template.")
    prompt_template: str = Field(
        "{question}", description="Text of a prompt; {question} stands for the question."
    )
    max_prompt_length: int = Field(1024, ge=1, description="Longest prompt in tokens.")
    overlong_prompts: Literal["drop", "error"] = Field("drop", description="What to do with a longer one.")
    verifier: str | None = Field(
        None,
        description="Scores a response: exact_match, math_verify, reasoning_gym, path/to/file.py:function or "
        "package.module:function; null is reasoning_gym with a task, else exact_match.",
    )
    verifier_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the verifier, e.g. {style: boxed}."
    )
    verifier_timeout: float | None = Field(
        10.0,
        gt=0,
        description="Seconds a response may take, beyond them its verification failed; null scores in the "
        "training process, faster and unguarded.",
    )
    verifier_failure_reward: float | None = Field(
        None,
        description="Reward of a response whose verification failed; null leaves it out of the loss and of "
        "its group's mean and standard deviation.",
    )
    verifier_workers: int = Field(1, ge=1, description="Verifier processes per rank.")
    shuffle: bool = Field(True, description="Draw prompts in a new order, from seed, on each pass.")

    @property
    def resolved_verifier(self) -> str:
        """The verifier's name, null resolved."""
        return self.verifier or ("reasoning_gym" if self.task else "exact_match")

    @property
    def has_eval_prompts(self) -> bool:
        return self.eval_prompts is not None or (self.task is not None and self.task.eval_size > 0)


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang", "demonstrations"] = Field(
        "embedded",
        description="Source of responses: the policy in Transformers, SGLang servers, or the reference answers (sft).",
    )
    rollout_batch_size: int = Field(description="Prompts per rollout batch.", ge=1)
    n_samples_per_prompt: int = Field(
        8, ge=1, description="Responses per prompt: the group that advantages compare."
    )
    max_response_length: int = Field(1024, ge=1, description="Longest response in tokens.")
    temperature: float = Field(
        1.0, gt=0, description="Sampling temperature; the training log-probs use it too."
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the likeliest tokens of this total probability."
    )
    top_k: int = Field(0, ge=0, description="Sample from so many likeliest tokens; 0 is all.")
    max_batch_size: int = Field(256, ge=1, description="Sequences that the embedded engine decodes at once on a rank.")
    max_staleness: int = Field(
        0,
        ge=0,
        description="Most updates that the weights which drew a token may be behind those that it is trained on with; "
        "0 is on-policy.",
    )
    overlap: bool = Field(
        False, description="Generate while training; with max_staleness 1 one step ahead, with n as far as n steps."
    )
    oversampling: float = Field(
        1.0,
        ge=1,
        description="Groups begun for each that a step needs; the step takes those that finish first and stops the "
        "others, which start over or, with max_staleness, go on after the update: then at most 1 + max_staleness.",
    )

    environment: str | None = Field(
        None,
        description="Makes samples multi-turn episodes and scores them in the verifier's place: "
        "path/to/file.py:factory or package.module:factory; null is one response.",
    )
    environment_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the factory, e.g. {partial_credit: true}."
    )
    max_turns: int = Field(8, ge=1, description="With an environment, most responses of an episode.")
    max_turn_length: int | None = Field(
        None,
        ge=1,
        description="With an environment, longest response of a turn in tokens; max_response_length holds for all "
        "responses and observations of an episode together. null is what is left of it.",
    )

    @property
    def streams(self) -> bool:
        """Whether groups live longer than the step that began them, or begin in greater number than it takes."""
        return self.max_staleness > 0 or self.oversampling > 1

    @property
    def sequences(self) -> int:
        """Responses of a rollout batch."""
        return self.rollout_batch_size * self.n_samples_per_prompt


class RoutingConfig(Section):
    replay: Literal["none", "r2", "r3"] = Field(
        "none",
        description="Experts that a training pass uses: the live router's, those of the old policy in the training "
        "engine (r2), or those that the rollout engine took (r3). Their weights are always the live router's.",
    )
    replay_old_log_probs: bool = Field(
        True, description="With r3, the old policy's log-probs are computed under the rollout's routes too."
    )
    holes: Literal["error", "live"] = Field(
        "error", description="With r3, tokens whose route the engine didn't give: stop, or ask the live router."
    )
    storage: Literal["device", "host"] = Field(
        "device", description="Where a mini-batch's routes wait: GPU memory, or pinned host memory."
    )
    metrics: bool = Field(
        True, description="Expert flips, router entropy and expert load of a mixture of experts (routing/*)."
    )
    sampled_sequences: int = Field(
        8,
        ge=1,
        description="Sequences of a rollout batch that expert flips are measured on where nothing is replayed.",
    )
    compare_rollout: bool = Field(
        False, description="Ask the rollout engine for its routes to measure routing/rollout_flip_rate; r3 does."
    )

    @property
    def needs_rollout_routes(self) -> bool:
        """Whether the rollout engine is to return the routes that it took."""
        return self.replay == "r3" or self.compare_rollout
