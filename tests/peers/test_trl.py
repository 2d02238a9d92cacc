"""TRL's GRPOTrainer on the same batch: its own `_compute_loss` and advantages, on a real trainer of
a tiny model.

Only the method that runs the model is replaced: it returns the given log-probs, so that both losses
have the same leaf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_gspo.algorithms import (
    Objective,
    group_advantages,
    preset,
    token_importance_weights,
    token_rejection_mask,
)

from .batch import Padded, Result, assert_same, cuts, make_batch, ours

trl = pytest.importorskip(
    "trl", reason="TRL is not installed: make test-peers brings it", exc_type=ImportError
)
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from megatron_gspo.tools.make_tiny_model import TinyModel, write_tiny_model  # noqa: E402

LENGTH = 12  # max_completion_length; dr_grpo's constant
REWARDS = [1.0, 0.0, 0.0, 2.0, 0.5, 0.5, -1.0, 0.25]


class FedTrainer(trl.GRPOTrainer):
    """Scores with `self.fed` [B, R] instead of the model."""

    fed: Tensor

    def _get_per_token_logps_and_entropies(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, None]:
        return self.fed, torch.zeros_like(self.fed), None


def rewards_in_order(completions: list[str], **_: Any) -> list[float]:
    return REWARDS[: len(completions)]


Make = Callable[..., trl.GRPOTrainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(
        folder, TinyModel(hidden=16, layers=1, experts=2, experts_per_token=1, expert_width=8)
    )
    return folder


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Iterator[Make]:
    """A trainer of `kind` whose generation batch is 8 rows unless the options set more."""

    def build(
        kind: type[trl.GRPOTrainer] = FedTrainer, micro_batch: int = 8, **options: Any
    ) -> trl.GRPOTrainer:
        config = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=8 // micro_batch,
            num_generations=4,
            max_completion_length=LENGTH,
            **{"router_aux_loss_coef": 0.0, **options},
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        data = Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        trainer = kind(
            model, rewards_in_order, config, train_dataset=data, processing_class=tokenizer
        )
        trainer.model.train()
        return trainer

    yield build


def run(trainer: trl.GRPOTrainer, batch: Padded, num_items: int | None = None) -> Result:
    """Loss and gradient summed over the micro-batches, which is what TRL's optimizer steps on."""
    size = trainer.args.per_device_train_batch_size
    trainer.current_gradient_accumulation_steps = len(batch) // size  # Trainer.train sets this
    losses = []
    gradients = []
    for cut in cuts(batch, size):
        piece = batch.rows(cut)
        trainer.fed = piece.log_probs.clone().requires_grad_()
        ids = torch.ones(piece.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": ids,
            "tool_mask": piece.mask.long(),
            "advantages": piece.advantages,
            "old_per_token_logps": piece.old_log_probs,
            "ref_per_token_logps": piece.ref_log_probs,
            "num_items_in_batch": torch.tensor(num_items or batch.num_tokens),
        }
        loss = trainer._compute_loss(trainer.model, inputs)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, trainer.fed)[0])
    # Of the one micro-batch, or the mean over them: TRL logs the latter.
    metrics = {
        name: math.fsum(values) / len(values) for name, values in trainer._metrics["train"].items()
    }
    return Result(math.fsum(losses), torch.cat(gradients), metrics)


def settings(objective: Objective, loss_type: str) -> dict[str, Any]:
    level = "sequence" if objective.sequence_level else "token"
    clip = {"epsilon": objective.epsilon_low, "epsilon_high": objective.epsilon_high}
    return {
        "importance_sampling_level": level,
        "loss_type": loss_type,
        "beta": objective.kl_loss_coef,
        **clip,
    }


PAIRS = {
    "gspo": (preset("gspo"), "grpo", 6e-4),
    "grpo": (preset("grpo"), "grpo", 0.2),
    "dr_grpo": (preset("dr_grpo", loss_scale_factor=LENGTH), "dr_grpo", 0.2),
    "dapo": (preset("dapo"), "dapo", 0.2),
}


@pytest.mark.parametrize("micro_batch", [8, 4, 2, 1])
@pytest.mark.parametrize("pair", PAIRS)
def test_equal(make: Make, pair: str, micro_batch: int) -> None:
    objective, loss_type, drift = PAIRS[pair]
    batch = make_batch(drift=drift)
    our = ours(objective, batch, micro_batch=micro_batch)
    assert our.metrics["clip_fraction/lower"] > 0 < our.metrics["clip_fraction/upper"]
    assert_same(run(make(micro_batch=micro_batch, **settings(objective, loss_type)), batch), our)


@pytest.mark.parametrize("pair", ["gspo", "grpo", "dapo"])
def test_kl_is_equal_without_the_bias_correction(make: Make, pair: str) -> None:
    objective, loss_type, drift = PAIRS[pair]
    objective = replace(objective, kl_loss_coef=0.04)
    batch = make_batch(drift=drift)
    theirs = run(make(**settings(objective, loss_type), use_bias_correction_kl=False), batch)
    our = ours(objective, batch, with_ref=True)
    assert_same(theirs, our)
    assert theirs.metrics["kl"] == pytest.approx(our.metrics["kl/ref"], rel=1e-6)


def test_clip_fractions_are_equal(make: Make) -> None:
    """By token for a token ratio; for a sequence ratio TRL counts sequences, as our
    clip_fraction/sequences does.
    """
    for pair, names in {
        "grpo": {"low_mean": "lower", "high_mean": "upper", "region_mean": "tokens"},
        "gspo": {"region_mean": "sequences"},
    }.items():
        objective, loss_type, drift = PAIRS[pair]
        batch = make_batch(drift=drift)
        theirs = run(make(**settings(objective, loss_type)), batch)
        our = ours(objective, batch)
        for trl_name, our_name in names.items():
            value = our.metrics[f"clip_fraction/{our_name}"]
            assert (
                theirs.metrics[f"clip_ratio/{trl_name}"] == pytest.approx(value, rel=1e-6)
                and value > 0
            )


def test_delta_is_the_dual_clip(make: Make) -> None:
    objective = replace(preset("grpo"), dual_clip=2.0)
    batch = make_batch(drift=1.0)
    our = ours(objective, batch)
    assert our.metrics["clip_fraction/dual"] > 0
    assert_same(run(make(**settings(objective, "grpo"), delta=2.0), batch), our)


# objective, loss_type, level, drift, options
NEWER: dict[str, tuple[Objective, str, str, float, dict[str, Any]]] = {
    "cispo": (preset("cispo"), "cispo", "token", 1.0, {"epsilon_high": 5.0}),
    # TRL rounds the temperatures to float32: one that float32 has
    "sapo": (
        preset("sapo", tau_neg=1.0625),
        "sapo",
        "token",
        0.5,
        {"sapo_temperature_neg": 1.0625},
    ),
    "luspo": (preset("luspo"), "luspo", "sequence", 6e-4, {"epsilon": 3e-4, "epsilon_high": 4e-4}),
    "grpo_off_policy": (
        preset("grpo", off_policy_mask_threshold=0.05),
        "grpo",
        "token",
        0.2,
        {"epsilon": 0.2, "epsilon_high": 0.27, "off_policy_mask_threshold": 0.05},
    ),
    "gspo_off_policy": (
        preset("gspo", off_policy_mask_threshold=2e-4),
        "grpo",
        "sequence",
        6e-4,
        {"epsilon": 3e-4, "epsilon_high": 4e-4, "off_policy_mask_threshold": 2e-4},
    ),
    "unbiased_kl": (
        preset("grpo", kl_loss_coef=0.04, unbiased_kl=True),
        "grpo",
        "token",
        0.2,
        {"epsilon": 0.2, "epsilon_high": 0.27, "beta": 0.04, "use_bias_correction_kl": True},
    ),
}


@pytest.mark.parametrize("micro_batch", [8, 2])
@pytest.mark.parametrize("pair", NEWER)
def test_newer_objectives_are_equal(make: Make, pair: str, micro_batch: int) -> None:
    objective, loss_type, level, drift, options = NEWER[pair]
    batch = make_batch(drift=drift)
    our = ours(objective, batch, micro_batch=micro_batch, with_ref=True)
    settings = {"beta": 0.0, "importance_sampling_level": level, "loss_type": loss_type, **options}
    assert_same(run(make(micro_batch=micro_batch, **settings), batch), our)
    if objective.off_policy_mask_threshold is not None:
        assert 0 < our.metrics["off_policy_mask/sequences"] < 1


def test_gmpo_is_equal(make: Make) -> None:
    from trl.experimental.gmpo import GMPOTrainer

    class FedGMPO(FedTrainer, GMPOTrainer):
        pass

    batch = make_batch(drift=0.5)
    assert_same(
        run(make(FedGMPO, epsilon=0.4, epsilon_high=0.4, beta=0.0), batch),
        ours(preset("gmpo"), batch),
    )


# Corrections for the rollout engine, of real rollouts: completions, log-probs of both engines and
# rewards are given.


class Sampled(FedTrainer):
    """Its engine returns `self.rollout` [B, R] as the log-probs of completions of random tokens."""

    rollout: Tensor
    tool_mask: Tensor

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        ids = torch.randint(
            4, 20, self.rollout.shape, generator=torch.Generator().manual_seed(0)
        ).tolist()
        return (
            [[4]] * len(prompts),
            ids,
            self.tool_mask.long().tolist(),
            ["."] * len(prompts),
            self.rollout.tolist(),
            {},
            None,
            None,
        )


def corrected(
    make: Make, batch: Padded, rollout: Tensor, **options: Any
) -> tuple[Result, Tensor, Tensor]:
    """TRL's loss with `importance_sampling_ratio`, its ratio [B, R] and its advantages."""
    trainer = make(
        Sampled,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        epsilon_high=0.27,
        scale_rewards="none",
        **{f"vllm_importance_sampling_{name}": value for name, value in options.items()},
    )
    trainer.use_vllm = True  # only after the constructor, which would start one
    trainer.rollout = rollout
    trainer.tool_mask = batch.mask
    trainer.fed = batch.old_log_probs
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the tensor that it makes of the engine's log-probs
    try:
        inputs = trainer._generate_and_score_completions(
            [{"prompt": "1+1="} for _ in range(len(batch))]
        )
    finally:
        torch.set_default_dtype(default)
    trainer.current_gradient_accumulation_steps = 1
    trainer.fed = batch.log_probs.clone().requires_grad_()
    loss = trainer._compute_loss(trainer.model, inputs)
    result = Result(loss.item(), torch.autograd.grad(loss, trainer.fed)[0], {})
    return result, inputs["importance_sampling_ratio"], inputs["advantages"].double()


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_token_corrections_are_equal(make: Make, mode: str) -> None:
    """`rollout_is: token` with both bounds, and IcePop: TRL's masked tokens stay in the
    denominators.
    """
    batch = make_batch(drift=0.2)
    noise = torch.randn(
        batch.mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    rollout = batch.old_log_probs + 0.7 * noise
    theirs, ratio, advantages = corrected(
        make, batch, rollout, mode=mode, clip_min=0.5, clip_max=2.0
    )
    flat = batch.old_log_probs.flatten(), rollout.flatten(), batch.mask.flatten()
    if mode == "token_truncate":
        weights = token_importance_weights(*flat, threshold=2.0, lower=0.5)
    else:
        kept = token_rejection_mask(*flat, lower=0.5, upper=2.0)
        assert 0 < kept.sum() < batch.num_tokens
        weights = token_importance_weights(*flat, threshold=2.0) * kept
    weights = weights.view_as(batch.mask)
    trained = batch.mask > 0
    torch.testing.assert_close(ratio[trained], weights[trained], rtol=1e-12, atol=0)
    our = ours(preset("grpo"), replace(batch, advantages=advantages[:, None] * weights))
    assert_same(theirs, our)


def test_the_default_mode_is_a_mask_of_the_product(make: Make) -> None:
    """`sequence_mask` up to 3, without a lower bound; neither our `geometric` nor a weight of 1."""
    batch = make_batch(drift=0.2)
    rollout = batch.old_log_probs + 0.1
    rollout[3] -= 0.6
    _, ratio, _ = corrected(make, batch, rollout)
    product = ((batch.old_log_probs - rollout) * batch.mask).sum(1, keepdim=True).exp()
    assert (product > 3).any()
    torch.testing.assert_close(ratio, torch.where(product > 3, 0, product), rtol=1e-12, atol=0)


# What TRL computes differently.


def test_there_is_no_trainer_of_dppo_ppo_or_gspo_token() -> None:
    experimental = Path(trl.__file__).parent / "experimental"
    assert (experimental / "gmpo").is_dir()
    assert not any((experimental / name).exists() for name in ("dppo", "ppo", "gspo_token"))
    assert not hasattr(trl, "PPOTrainer")


def test_sapos_temperatures_are_rounded_to_float32(make: Make) -> None:
    """At the published 1.05; with the rounded temperature ours is equal."""
    batch = make_batch(drift=0.5)
    theirs = run(make(beta=0.0, loss_type="sapo", importance_sampling_level="token"), batch)
    rounded = torch.tensor(1.05, dtype=torch.float32).item()
    assert_same(theirs, ours(preset("sapo", tau_neg=rounded), batch))
    assert 1e-10 < abs(theirs.loss / ours(preset("sapo"), batch).loss - 1) < 1e-6


def test_neither_gspo_nor_grpo_is_the_default() -> None:
    default = trl.GRPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    assert (default.loss_type, default.importance_sampling_level, default.scale_rewards) == (
        "dapo",
        "token",
        "group",
    )


def test_the_kl_is_multiplied_by_the_ratio_by_default(make: Make) -> None:
    """arXiv:2512.02556; GRPO's own KL term (arXiv:2402.03300, eq. 3) has no ratio before it."""
    objective = replace(preset("grpo"), kl_loss_coef=0.04)
    batch = make_batch(drift=0.2)
    theirs = run(make(**settings(objective, "grpo")), batch)
    our = ours(objective, batch, with_ref=True)
    difference = 0.0
    for row in range(len(batch)):
        trained = [t for t in range(LENGTH) if batch.mask[row, t]]
        for t in trained:
            d = float(batch.log_probs[row, t] - batch.ref_log_probs[row, t])
            ratio = math.exp(batch.log_probs[row, t] - batch.old_log_probs[row, t])
            difference += 0.04 * (ratio - 1) * (math.exp(-d) - 1 + d) / len(trained) / len(batch)
    assert theirs.loss - our.loss == pytest.approx(difference, rel=1e-9) and abs(difference) > 1e-6


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_sequence_ratio_with_a_token_mean_weighs_sequences_by_their_tokens(
    make: Make, loss_type: str
) -> None:
    batch = make_batch(drift=6e-4)
    theirs = run(make(**settings(preset("gspo"), loss_type)), batch)
    published = ours(preset("gspo"), batch)
    assert abs(theirs.loss - published.loss) > 0.1 * abs(published.loss)
    assert_same(
        theirs, ours(preset("gspo", loss_agg_mode="token-mean", allow_nonstandard=True), batch)
    )


def test_bnpo_depends_on_the_micro_batch(make: Make) -> None:
    """The token mean of each micro-batch, all of the same weight, is not the token mean."""
    objective = preset("dapo")
    batch = make_batch(drift=0.2)
    token_mean = ours(objective, batch)
    whole, by_two = (run(make(micro_batch=n, **settings(objective, "bnpo")), batch) for n in (8, 2))
    assert_same(whole, token_mean)
    assert abs(by_two.loss - whole.loss) > 0.01 * abs(whole.loss)
    parts = [ours(objective, batch.rows(cut)).loss for cut in cuts(batch, 2)]
    assert by_two.loss == pytest.approx(math.fsum(parts) / len(parts), rel=1e-12)


def test_dapo_divides_by_the_mean_tokens_of_the_generation_batch(make: Make) -> None:
    """With two optimizer steps a generation batch, a step of long responses weighs more than
    one of short ones.
    """
    objective = preset("dapo")
    batch = make_batch(drift=0.2)
    of_other_step = 3 * batch.num_tokens
    trainer = make(**settings(objective, "dapo"), steps_per_generation=2)
    theirs = run(trainer, batch, num_items=batch.num_tokens + of_other_step)
    our = ours(objective, batch)
    assert theirs.loss == pytest.approx(our.loss / 2, rel=1e-12)
    torch.testing.assert_close(theirs.gradient, our.gradient / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pair", ["gspo", "grpo", "dr_grpo"])
def test_a_masked_response_still_counts_in_the_mean(make: Make, pair: str) -> None:
    """TRL's mask_truncated_completions leaves the row in; ours divides by the responses that
    are trained.
    """
    objective, loss_type, drift = PAIRS[pair]
    batch = make_batch(drift=drift)
    batch.mask[4] = 0
    theirs = run(make(**settings(objective, loss_type)), batch)
    our = ours(objective, batch)
    assert theirs.loss == pytest.approx(our.loss * 7 / 8, rel=1e-12)
    torch.testing.assert_close(theirs.gradient, our.gradient * 7 / 8, rtol=1e-12, atol=0)


def test_an_overflowing_ratio_gives_nan_there_and_no_gradient_here(make: Make) -> None:
    """TRL has no limit on the log-ratio: the clip hides inf in the loss, and its gradient is 0
    * inf.
    """
    batch = make_batch(drift=0.2, dtype=torch.float32)
    batch.log_probs[0, 0], batch.old_log_probs[0, 0] = -1.0, -101.0
    theirs = run(make(**settings(preset("grpo"), "grpo")), batch)
    our = ours(preset("grpo"), batch)
    assert theirs.loss == pytest.approx(our.loss, rel=1e-6)
    assert math.isnan(theirs.gradient[0, 0])
    assert our.gradient[0, 0] == 0 and torch.isfinite(our.gradient).all()


def test_it_reads_what_is_masked_and_ours_does_not(make: Make) -> None:
    batch = make_batch(drift=6e-4)
    clean = ours(preset("gspo"), batch)
    batch.log_probs[batch.mask == 0] = math.nan
    assert math.isnan(run(make(**settings(preset("gspo"), "grpo")), batch).loss)
    assert_same(ours(preset("gspo"), batch), clean)


def test_the_routers_auxiliary_loss_is_on_by_default(make: Make) -> None:
    """Where the model's own config declares one, as Qwen3-MoE's does. We train without it."""
    trainer = make(router_aux_loss_coef=None)
    assert trainer.aux_loss_enabled and trainer.router_aux_loss_coef == 0.001


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_group_advantages_differ_by_an_epsilon_in_the_std(make: Make, scale_rewards: str) -> None:
    """A real rollout of 2 prompts x 4 responses with fixed rewards."""
    trainer = make(trl.GRPOTrainer, scale_rewards=scale_rewards)
    prompts = [{"prompt": text} for text in ("1+1=", "2+2=") for _ in range(4)]
    theirs = trainer._generate_and_score_completions(prompts)["advantages"].double()
    groups = torch.tensor([0] * 4 + [1] * 4)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    deviation = group_advantages(rewards, groups, std="none").double()
    if scale_rewards == "none":
        torch.testing.assert_close(theirs, deviation, rtol=1e-6, atol=1e-7)
        return
    std = rewards.view(2, 4).std(dim=1).repeat_interleave(4)
    torch.testing.assert_close(theirs, deviation / (std + 1e-4), rtol=1e-6, atol=1e-6)
    difference = (theirs / group_advantages(rewards, groups).double() - 1)[deviation != 0]
    torch.testing.assert_close(
        difference, (-1e-4 / (std + 1e-4))[deviation != 0], rtol=0.05, atol=0
    )
