"""Checks of the algorithm, of corrections for the rollout engine and of routing replay.

Each raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_gspo.config.algorithm_section import AlgorithmConfig
from megatron_gspo.config.config_error import ConfigError, show
from megatron_gspo.config.fields import default_of
from megatron_gspo.config.model_sections import ModelConfig
from megatron_gspo.config.rollout_sections import RolloutConfig, RoutingConfig
from megatron_gspo.models.config_defaults import HFConfig


def refuse_products_of_ratios(algorithm: object) -> None:
    """Refuse `sequence` where verl and TRL mean the product of a sequence's token ratios by it.

    algorithm: the section as it was written, before its values are checked.
    """
    if not isinstance(algorithm, Mapping):
        return
    for key in ("rollout_is", "rollout_rs"):
        if algorithm.get(key) == "sequence":
            problem = (
                "has two meanings: the product of a sequence's token ratios (verl, TRL), which is"
                " not offered, and their geometric mean"
            )
            raise ConfigError(
                f"algorithm.{key}", "sequence", problem, f"write algorithm.{key}: geometric"
            )


def check_algorithm(
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    model: ModelConfig,
    *,
    needs_groups: bool = True,
) -> None:
    """The algorithm, the source of its samples and its reference policy are compatible.

    needs_groups: whether the responses to a prompt are compared.
    """
    if algorithm.is_supervised != (rollout.engine == "sft"):
        fix = "set rollout.engine: sft" if algorithm.is_supervised else "set algorithm.name: sft"
        problem = f"does not go with algorithm.name = {show(algorithm.name)}"
        raise ConfigError("rollout.engine", rollout.engine, problem, fix)
    samples = rollout.n_samples_per_prompt
    if algorithm.is_supervised and samples != 1:
        raise ConfigError(
            "rollout.n_samples_per_prompt",
            samples,
            "sft has one response per prompt",
            "set it to 1",
        )
    compares = needs_groups and algorithm.advantage_estimator == "group"
    if not algorithm.is_supervised and compares and samples < 2:
        problem = "group advantages compare at least two responses"
        raise ConfigError(
            "rollout.n_samples_per_prompt", samples, problem, "set it to 2 or more, 8 is usual"
        )
    if algorithm.dynamic_sampling and samples < 2 and not algorithm.is_supervised:
        problem = "a group of one response has one reward, so that every group would be replaced"
        raise ConfigError(
            "algorithm.dynamic_sampling",
            True,
            problem,
            "set rollout.n_samples_per_prompt to 2 or more",
        )
    for key in ("kl_reward_coef", "dynamic_sampling"):
        if algorithm.is_supervised and (value := getattr(algorithm, key)):
            raise ConfigError(f"algorithm.{key}", value, "sft has no rewards", "remove the key")
    if algorithm.kl_loss_coef and algorithm.kl_reward_coef:
        problem = "counts the KL twice, with algorithm.kl_loss_coef"
        raise ConfigError(
            "algorithm.kl_reward_coef", algorithm.kl_reward_coef, problem, "set one of the two to 0"
        )
    if algorithm.needs_reference and model.init == "random":
        key = "kl_loss_coef" if algorithm.kl_loss_coef else "kl_reward_coef"
        problem = "is the KL to the initial weights, which are random"
        fix = "set model.init: pretrained, or this to 0"
        raise ConfigError(f"algorithm.{key}", getattr(algorithm, key), problem, fix)
    _check_length_penalty(algorithm, rollout.max_response_length)


def _check_length_penalty(algorithm: AlgorithmConfig, longest: int) -> None:
    buffer = algorithm.overlong_buffer_len
    key = "algorithm.overlong_buffer_len"
    if algorithm.truncated == "penalize" and not 0 < buffer <= longest:
        problem = "truncated: penalize needs a buffer inside the response"
        fix = f"set 1 to {longest} (rollout.max_response_length), a quarter is usual"
        raise ConfigError(key, buffer, problem, fix)
    if algorithm.truncated != "penalize" and buffer:
        problem = f"has no effect with algorithm.truncated = {show(algorithm.truncated)}"
        raise ConfigError(key, buffer, problem, "set algorithm.truncated: penalize, or remove it")


def check_rollout_correction(algorithm: AlgorithmConfig) -> None:
    """Importance and rejection sampling of the rollout have both engines' log-probs, and their
    keys have an effect.
    """
    for key in ("rollout_is", "rollout_rs"):
        if (value := getattr(algorithm, key)) == "none":
            continue
        if algorithm.is_supervised:
            raise ConfigError(f"algorithm.{key}", value, "sft has no rollouts", "remove the key")
        if algorithm.old_log_probs == "rollout":
            problem = (
                "compares the rollout's log-probs with themselves where algorithm.old_log_probs ="
                " rollout"
            )
            fix = "set algorithm.old_log_probs: recompute, or this to none"
            raise ConfigError(f"algorithm.{key}", value, problem, fix)
    if algorithm.needs_rollout_log_probs and algorithm.rollout_is != "none":
        problem = (
            "weighs by the rollout engine's log-probs twice, with algorithm.name ="
            f" {algorithm.name}"
        )
        raise ConfigError("algorithm.rollout_is", algorithm.rollout_is, problem, "set it to none")
    if algorithm.needs_rollout_log_probs and algorithm.old_log_probs == "rollout":
        problem = f"{algorithm.name} clips by the training engine's old log-probs"
        raise ConfigError("algorithm.old_log_probs", "rollout", problem, "set it to recompute")
    ratios = ("token", "geometric")
    divergences = ("token_binary_kl", "sequence_k3")
    for method, key, methods in (
        ("rollout_is", "rollout_is_threshold", ratios),
        ("rollout_is", "rollout_is_threshold_lower", ratios),
        ("rollout_rs", "rollout_rs_threshold_lower", ratios),
        ("rollout_rs", "rollout_rs_threshold", ratios),
        ("rollout_rs", "rollout_rs_divergence", divergences),
        ("rollout_rs", "rollout_rs_denominator", ratios + divergences),
    ):
        value = getattr(algorithm, key)
        chosen = getattr(algorithm, method)
        if chosen not in methods and value != default_of(AlgorithmConfig, key):
            problem = f"has no effect with algorithm.{method} = {chosen}"
            raise ConfigError(
                f"algorithm.{key}", value, problem, f"set that to {' or '.join(methods)}"
            )
    if algorithm.rollout_rs in divergences and algorithm.rollout_rs_divergence is None:
        problem = f"is the largest divergence of algorithm.rollout_rs = {algorithm.rollout_rs}"
        fix = "set it, sequence_k3 is published with 0.001"
        raise ConfigError("algorithm.rollout_rs_divergence", None, problem, fix)
    if algorithm.rollout_rs == "geometric" and algorithm.rollout_rs_threshold is None:
        problem = (
            "the ratio of a sequence is closer to 1 the longer it is, so no threshold fits all"
            " lengths"
        )
        fix = "set it beyond mismatch/ratio_sequence/p99, 1.001 or so for thousands of tokens"
        raise ConfigError("algorithm.rollout_rs_threshold", None, problem, fix)


def check_score_centering(algorithm: AlgorithmConfig, *, samples_are_runs: bool) -> None:
    """The weight of every token of the vocabulary is known, not only of the sampled one.

    samples_are_runs: of agents, or episodes.
    """
    if not algorithm.score_centering:
        return
    by_token = not algorithm.sequence_level
    token_rule = next(
        (
            key
            for key in ("rollout_is", "rollout_rs")
            if getattr(algorithm, key).startswith("token")
        ),
        None,
    )
    fix = "set it to 0"
    if algorithm.is_supervised:
        problem = "sft has no rollouts"
    elif samples_are_runs:
        problem = "runs and episodes have the log-probs of sampled tokens alone"
    elif by_token and algorithm.has_own_surrogate:
        problem = (
            "your own algorithm.surrogate has no known weight for tokens that were not sampled"
        )
    elif by_token and algorithm.old_log_probs == "rollout" and not algorithm.weighs_by_rollout:
        problem = "the clip of algorithm.old_log_probs = rollout depends on the sampled token"
        fix = "set algorithm.old_log_probs: recompute, or algorithm.name: cispo"
    elif not by_token and token_rule is not None:
        problem = f"{algorithm.name} has one ratio per response and algorithm.{token_rule} by token"
        fix = f"set algorithm.{token_rule}: geometric"
    elif algorithm.rollout_rs == "token_binary_kl":
        problem = (
            "which other tokens algorithm.rollout_rs = token_binary_kl would keep is not known"
        )
        fix = "set algorithm.rollout_rs: token"
    elif algorithm.rollout_rs == "token" and algorithm.rollout_rs_denominator == "kept":
        problem = "a rejected token takes its position out of the loss, and the centering with it"
        fix = "set algorithm.rollout_rs_denominator: all"
    else:
        return
    raise ConfigError("algorithm.score_centering", algorithm.score_centering, problem, fix)


def check_top_ids(algorithm: AlgorithmConfig, hf: HFConfig) -> None:
    """The model has as many ids. hf: its config.json."""
    count = algorithm.score_centering
    if count and count > hf["vocab_size"]:
        problem = f"the model has {hf['vocab_size']} ids"
        raise ConfigError("algorithm.score_centering", count, problem, "lower it, 32 is usual")


def check_routing(routing: RoutingConfig, algorithm: AlgorithmConfig) -> None:
    """Routing replay has routes to replay, and its keys have an effect."""
    if routing.replay != "none" and not algorithm.has_ratio:
        problem = f"{algorithm.name} has no old policy whose routes could be replayed"
        raise ConfigError("routing.replay", routing.replay, problem, "set it to none")
    if routing.replay == "r2" and algorithm.old_log_probs == "rollout":
        problem = "records the routes in the pass that algorithm.old_log_probs = rollout leaves out"
        raise ConfigError(
            "routing.replay", "r2", problem, "set it to r3, or algorithm.old_log_probs: recompute"
        )
    if routing.missing_routes == "live" and routing.replay != "r3":
        problem = f"has no effect with routing.replay = {show(routing.replay)}"
        raise ConfigError(
            "routing.missing_routes", "live", problem, "set routing.replay: r3, or remove it"
        )
    if routing.perturbation_options and routing.perturbation is None:
        raise ConfigError(
            "routing.perturbation_options",
            routing.perturbation_options,
            "has no effect with routing.perturbation = null",
            "set that, or remove the key",
        )
    if routing.compare_rollout and not (routing.metrics and algorithm.has_ratio):
        key = f"algorithm.name = {algorithm.name}"
        if algorithm.has_ratio:
            key = "routing.metrics = false"
        raise ConfigError("routing.compare_rollout", True, f"has no effect with {key}", "remove it")
