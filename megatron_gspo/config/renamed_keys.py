"""Keys and values that older versions used: errors that name the new ones, and the upgrade of old run directories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_gspo.config.config_error import ConfigError, show


@dataclass(frozen=True)
class Renamed:
    """The new name of a key, and what its old values are now (unchanged if not listed).

    problem: what the error says of an old value; empty is that it was renamed.
    """

    new: str
    values: dict[Any, Any] | Callable[[Any], Any] | None = None
    problem: str = ""

    def value(self, old: Any) -> Any:
        """The new value for an old one."""
        if callable(self.values):
            return self.values(old)
        return (self.values or {}).get(old, old) if isinstance(old, (str, bool)) else old


def _with_the_first(refills: Any) -> Any:
    return refills + 1 if isinstance(refills, int) and not isinstance(refills, bool) else refills


_AGGREGATIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "token_mean": "token-mean",
    "constant": "seq-mean-token-sum-norm",
}

# The name has two meanings in the field; older versions had the second.
_SEQUENCE_RATIO = {"sequence": "geometric"}
_TWO_MEANINGS = (
    "has two meanings: the product of a sequence's token ratios (verl, TRL), which is not offered, and their "
    "geometric mean"
)

# Old key -> new key. A row whose names are equal lists values that changed.
RENAMED_KEYS: dict[str, Renamed] = {
    "algorithm.research_override": Renamed("algorithm.allow_nonstandard"),
    "algorithm.aggregation": Renamed("algorithm.loss_agg_mode", _AGGREGATIONS),
    "algorithm.constant_length": Renamed("algorithm.loss_scale_factor"),
    "algorithm.kl_estimator": Renamed("algorithm.kl_loss_type"),
    "algorithm.rollout_correction": Renamed("algorithm.rollout_is", _SEQUENCE_RATIO),
    "algorithm.rollout_correction_cap": Renamed("algorithm.rollout_is_threshold"),
    "algorithm.rollout_is": Renamed("algorithm.rollout_is", _SEQUENCE_RATIO, _TWO_MEANINGS),
    "algorithm.rollout_mask": Renamed("algorithm.rollout_rs", _SEQUENCE_RATIO),
    "algorithm.rollout_mask_low": Renamed("algorithm.rollout_rs_threshold_lower"),
    "algorithm.rollout_rs": Renamed("algorithm.rollout_rs", _SEQUENCE_RATIO, _TWO_MEANINGS),
    "algorithm.rollout_mask_high": Renamed("algorithm.rollout_rs_threshold"),
    "algorithm.zero_variance_groups": Renamed("algorithm.dynamic_sampling", {"keep": False, "refill": True}),
    "algorithm.max_refills": Renamed("algorithm.max_num_gen_batches", _with_the_first),
    "algorithm.overlong_buffer": Renamed("algorithm.overlong_buffer_len"),
    "model.recompute": Renamed("model.recompute_granularity"),
    "parallel.timeout_minutes": Renamed("parallel.distributed_timeout_minutes"),
    "training.epochs": Renamed("training.ppo_epochs"),
    "optimizer.lr_schedule": Renamed("optimizer.lr_decay_style"),
    "optimizer.warmup_steps": Renamed("optimizer.lr_warmup_steps"),
    "checkpoint.asynchronous": Renamed("checkpoint.async_save"),
    "checkpoint.interval": Renamed("checkpoint.save_interval"),
    "evaluation.interval": Renamed("evaluation.eval_interval"),
    "rollout.engine": Renamed("rollout.engine", {"demonstrations": "sft"}),
    "routing.holes": Renamed("routing.missing_routes"),
    "routing.sampled_sequences": Renamed("routing.metric_sequences"),
    "sglang.servers": Renamed("sglang.num_servers"),
    "sglang.arguments": Renamed("sglang.server_args"),
    "sglang.weight_route": Renamed("sglang.weight_transport"),
    "sglang.bucket_mb": Renamed("sglang.weight_bucket_mb"),
    "sglang.max_requests": Renamed("sglang.max_concurrent_requests"),
    "sglang.probe_interval": Renamed("sglang.log_prob_check_interval"),
    "sglang.probe_tolerance": Renamed("sglang.log_prob_check_tolerance"),
    "sglang.probe_action": Renamed("sglang.log_prob_check_action"),
    "tracking.picture": Renamed("tracking.plot"),
    "tracking.time_split": Renamed("tracking.detailed_timers"),
}


def refuse_old_keys(data: dict[str, Any]) -> None:
    """Raise ConfigError for the first key or value of an older version; it names the new one."""
    for old, row, value in _old_entries(data):
        new = row.value(value)
        if old == row.new:
            raise ConfigError(old, value, row.problem or "was renamed", f"write {old}: {_yaml(new)}")
        raise ConfigError(old, value, f"was renamed to {row.new}", f"write {row.new}: {_yaml(new)}")


def upgrade_old_keys(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config's plain data in which the keys and values of older versions are replaced by the new ones.

    For reading run directories of older versions. Data with new keys only is returned unchanged.
    """
    result = copy.deepcopy(data)
    algorithm = result.get("algorithm")
    if isinstance(algorithm, dict) and algorithm.get("name") == "dr_grpo" and "constant_length" in algorithm:
        algorithm["constant_length"] = algorithm["constant_length"] or 1024  # the preset's value at that time
    for old, row, value in list(_old_entries(result)):
        section, _, leaf = old.partition(".")
        del result[section][leaf]
        result[section][row.new.partition(".")[2]] = row.value(value)
    return result


def _old_entries(data: dict[str, Any]) -> Iterator[tuple[str, Renamed, Any]]:
    """(old key, its row, value) of what is in the data and changed."""
    for old, row in RENAMED_KEYS.items():
        name, _, leaf = old.partition(".")
        section = data.get(name)
        if isinstance(section, dict) and leaf in section:
            value = section[leaf]
            if old != row.new or row.value(value) != value:
                yield old, row, value


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
