"""What is compared: mini-batches with edge cases, objectives with every metric non-zero, cuts,
optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_gspo.algorithms import Distillation, Objective, ScoreCentering, preset
from megatron_gspo.config import LoRAConfig
from megatron_gspo.data.sample import Sample
from tests.algorithms.reference import TAPERED
from tests.equivalence.layouts import DENSE, MOE, Arrangement, turn_of
from tests.support.collapse_noise import noisy_pass
from tests.support.configs import adam, micro_batches_of


@dataclass(frozen=True)
class Scenario:
    """An objective with a mini-batch to suit it.

    ``spread``: how far, in nats, the old log-probs are from the current ones: by sequence and again
    by token. ``replay``: the samples carry random routes, which every pass uses. ``branches``: some
    samples are several rows, as an agent's run is. ``distillation``: from a teacher with
    ``teacher_columns``. ``score_centering``: of a rollout engine with ``rollout_columns``.
    ``truncated``: the samples have the ids that could be drawn.
    """

    objective: Objective
    spread: float
    per_token: bool = False
    temperature: float = 1.0
    replay: bool = False
    branches: bool = False
    distillation: Distillation | None = None
    all_ids: bool = False
    score_centering: ScoreCentering | None = None
    truncated: bool = False


# With these every metric takes a value that is neither 0 nor 1 (see test_truth.py): one sequence
# lies beyond max_log_ratio, some are clipped on either side, some by the dual clip.
SCENARIOS = {
    "gspo": Scenario(preset("gspo", max_log_ratio=0.5), 4e-4),
    "gspo_token": Scenario(
        preset(
            "gspo_token",
            epsilon_low=0.02,
            epsilon_high=0.03,
            dual_clip=1.04,
            kl_loss_coef=0.05,
            kl_loss_type="k2",
            max_log_ratio=0.5,
        ),
        0.05,
        per_token=True,
    ),
    "grpo": Scenario(
        preset("grpo", kl_loss_coef=0.1, entropy_coef=0.01, dual_clip=1.3, max_log_ratio=0.5),
        0.2,
        per_token=True,
        temperature=0.8,
    ),
}
# Routes that have nothing to do with the router's own choice: any token that went elsewhere would
# be far off.
REPLAYED = {
    "grpo, replayed": Scenario(
        preset("grpo", kl_loss_coef=0.1, dual_clip=1.3, max_log_ratio=0.5),
        0.2,
        per_token=True,
        replay=True,
    ),
    "gspo, branches and routes": Scenario(
        preset("gspo", max_log_ratio=0.5), 4e-4, replay=True, branches=True
    ),
}
BRANCHED = {"gspo, branches": Scenario(preset("gspo", max_log_ratio=0.5), 4e-4, branches=True)}
OTHERS = {
    "dapo": Scenario(preset("dapo"), 0.2, per_token=True),
    "dr_grpo": Scenario(preset("dr_grpo", loss_scale_factor=16), 0.2),
    "sft": Scenario(preset("sft"), 0.2),
    "gmpo": Scenario(
        preset("gmpo", epsilon_low=0.1, epsilon_high=0.15, off_policy_mask_threshold=0.05), 0.2
    ),
    "luspo": Scenario(preset("luspo", epsilon_low=0.02, epsilon_high=0.03), 0.05),
    "cispo": Scenario(preset("cispo", max_weight=1.2, log_ratio_coef=0.1), 0.2, per_token=True),
    "sapo": Scenario(preset("sapo", off_policy_mask_threshold=0.05), 0.2, per_token=True),
    "dppo_tv": Scenario(
        preset("dppo_tv", divergence_threshold=0.001, max_weight=1.3), 0.2, per_token=True
    ),
    "dppo_kl": Scenario(
        preset("dppo_kl", divergence_threshold=1e-4, kl_loss_coef=0.1, unbiased_kl=True),
        0.2,
        per_token=True,
    ),
    "minirl": Scenario(preset("minirl", max_weight=1.2), 0.2, per_token=True),
    "ppo": Scenario(preset("ppo"), 0.2, per_token=True),
    "a surrogate of one's own": Scenario(TAPERED, 0.2, per_token=True),
    "centred, replayed": Scenario(
        preset("grpo"),
        0.2,
        per_token=True,
        temperature=0.8,
        replay=True,
        score_centering=ScoreCentering(bounds=(0.1, 4.0), kept=(0.03, 50.0)),
    ),
    "over a support": Scenario(
        preset("grpo", kl_loss_coef=0.1, entropy_coef=0.01),
        0.2,
        per_token=True,
        temperature=0.8,
        truncated=True,
    ),
    "distilled, centred": Scenario(
        preset("gspo_token", epsilon_low=0.02, epsilon_high=0.03, entropy_coef=0.01),
        0.05,
        per_token=True,
        temperature=0.8,
        distillation=Distillation(coef=0.7, forward_weight=0.4),
        score_centering=ScoreCentering(),
    ),
    "distilled over all ids": Scenario(
        preset("gspo_token", epsilon_low=0.02, epsilon_high=0.03, entropy_coef=0.01),
        0.05,
        per_token=True,
        temperature=0.8,
        distillation=Distillation(coef=0.7, forward_weight=0.4),
        all_ids=True,
    ),
}
ALL = SCENARIOS | REPLAYED | BRANCHED | OTHERS
# While routes are recorded: each token's choice must not depend on the layout.
NOISE = noisy_pass()
CUTS = {"packed": micro_batches_of(80), "one by one": micro_batches_of(80, micro_batch_size=1)}
OTHER_CUTS = {
    "all in one": micro_batches_of(400),
    "threes": micro_batches_of(80, micro_batch_size=3),
}


@dataclass(frozen=True)
class Case:
    """One launch: an arrangement of processes and what they run.

    ``model``: ``recompute`` (`recompute_granularity`), else fields of ``ParallelConfig``. ``runs``:
    (scenario, cut). ``scored``: the scenario whose log-probs and entropies are also computed
    without a loss, in every cut of ``runs``. ``distributed_optimizers``: one training each.
    ``overlap``: gradients are reduced during the backward pass, weights gathered during the next
    forward pass. ``replays``: routes are recorded and replayed too. ``lora``: what is trained are
    adapters.
    """

    arrangement: Arrangement
    model: dict[str, Any]
    runs: tuple[tuple[str, str], ...]
    scored: str
    distributed_optimizers: tuple[bool, ...]
    overlap: bool = False
    replays: bool = False
    lora: LoRAConfig | None = None

    @property
    def scenarios(self) -> set[str]:
        """All whose truth is needed; every launch ends with the samples of ``gspo``."""
        return {"gspo", self.scored, *(name for name, _ in self.runs)}


def case_of(arrangement: Arrangement, among: Sequence[Arrangement] | None = None) -> Case:
    """All weights in an arrangement: every scenario, routing replay with experts, and training.
    ``among``: the model's layouts, by default all."""
    turn = turn_of(arrangement, among or (MOE if arrangement.moe else DENSE))
    runs = tuple((name, "packed") for name in SCENARIOS) + ((turn.one_by_one, "one by one"),)
    runs += tuple((name, "packed") for name in (REPLAYED if arrangement.moe else BRANCHED))
    return Case(
        arrangement,
        dict(recompute=turn.recompute),
        runs,
        turn.one_by_one,
        turn.distributed_optimizers,
        replays=arrangement.moe,
    )


def lora_case(arrangement: Arrangement, among: Sequence[Arrangement], lora: LoRAConfig) -> Case:
    """Adapters in an arrangement: one sequence-level and one token-level objective, replayed
    routes, and training.
    """
    turn = turn_of(arrangement, among)
    runs = (("gspo", "packed"), ("grpo", "one by one")) + (
        ("grpo, replayed", "packed"),
    ) * arrangement.moe
    return Case(
        arrangement,
        dict(recompute=turn.recompute),
        runs,
        "gspo",
        turn.distributed_optimizers,
        lora=lora,
    )


TRAINING = Scenario(
    preset("gspo", epsilon_low=0.08, epsilon_high=0.09, kl_loss_coef=0.1, entropy_coef=0.01), 0.05
)
# adam_eps is about the size of a clipped gradient's entries, so that a step is a smooth function of
# the gradient: with the usual 1e-8 the sign of a gradient of rounding noise would decide on a step
# of a whole lr.
OPTIMIZER_STEPS = 4  # of the learning-rate schedule
OPTIMIZER = adam(
    lr=1e-2,
    min_lr=1e-3,
    lr_decay_style="cosine",
    lr_warmup_steps=1,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.9,
    adam_eps=2e-4,
    clip_grad=0.2,
)


def make_samples(
    seed: int = 0,
    count: int = 10,
    vocab_size: int = 96,
    per_token: bool = False,
    mean_advantage: float = 0.0,
    scale: int = 1,
) -> list[Sample]:
    """A mini-batch of unequal lengths, masks with gaps, a response of one token and one without a
    trained token.

    ``scale``: on the lengths, which are 2 to 8 tokens of a prompt and 2 to 13 of a response.
    """
    g = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        prompt = scale * int(g.integers(2, 9))
        response = scale * int(g.integers(2, 14)) if i else 1
        mask = g.random(response) < 0.8
        mask[0] = True
        if i == 1:
            mask[:] = False
        advantage = g.normal(size=response) if per_token else np.full(response, g.normal())
        samples.append(
            Sample(
                prompt_index=i // 2,
                sample_index=i % 2,
                tokens=g.integers(2, vocab_size, prompt + response),
                prompt_length=prompt,
                loss_mask=mask,
                rollout_log_probs=None,
                finish_reason="stop",
                advantages=(advantage + mean_advantage).astype(np.float32),
            )
        )
    return samples


def with_branches(samples: list[Sample], seed: int) -> list[Sample]:
    """The samples of long responses cut into two to four rows, the others as they are. The first
    tokens of a later row are its prompt."""
    g = np.random.default_rng(seed)
    cut_samples = []
    for sample in samples:
        places = np.arange(sample.prompt_length + 1, sample.length - 2)
        if len(places) < 3:
            cut_samples.append(sample)
            continue
        starts = np.sort(g.choice(places, int(g.integers(1, 4)), replace=False))
        bounds = np.concatenate([[0], starts, [sample.length]])
        loss_mask = sample.loss_mask.copy()
        loss_mask[starts - sample.prompt_length] = False
        cut_samples.append(replace(sample, loss_mask=loss_mask, row_lengths=np.diff(bounds)))
    assert sum(sample.num_rows > 1 for sample in cut_samples) > len(samples) // 4
    return cut_samples


def with_supports(samples: list[Sample], vocab_size: int, seed: int) -> list[Sample]:
    """One to six ids that could be drawn at each response token, the token among them."""
    g = np.random.default_rng(seed)
    for sample in samples:
        supports = []
        for token in sample.response_ids:
            others = g.permutation(vocab_size)[: g.integers(0, 6)]
            supports.append(g.permutation(np.union1d(others, [token])))
        sample.support_lengths = np.array([len(ids) for ids in supports], dtype=np.int32)
        sample.support_ids = np.concatenate(supports).astype(np.int32)
    return samples


def with_old_log_probs(
    samples: list[Sample],
    log_probs: list[np.ndarray],
    spread: float,
    seed: int = 1,
    outlier: int | None = None,
) -> list[Sample]:
    """Old log-probs a little off the current ones, so that some sequences are clipped and some not;
    likewise ref and the rollout engine's.

    ``outlier``: a sample that the current policy likes better by 0.8 nats a token.
    """
    g = np.random.default_rng(seed)
    for i, (sample, value) in enumerate(zip(samples, log_probs, strict=True)):
        shift = g.normal() * spread - 0.8 * (i == outlier)
        sample.old_log_probs = (value + shift + g.normal(size=value.shape) * spread).astype(
            np.float32
        )
        sample.ref_log_probs = (value + g.normal(size=value.shape) * 0.3).astype(np.float32)
    for sample in samples:
        engine = sample.old_log_probs + g.normal(size=sample.old_log_probs.shape) * 0.3
        sample.rollout_log_probs = engine.astype(np.float32)
    return samples


def teacher_columns(
    samples: list[Sample], vocab_size: int, *, count: int = 5, seed: int = 7
) -> dict[str, np.ndarray]:
    """Columns of a batch of the samples: random distributions over random ids."""
    g = np.random.default_rng(seed)
    tokens = sum(sample.response_length for sample in samples)
    ids = np.stack([g.permutation(vocab_size)[:count] for _ in range(tokens)])
    shares = g.dirichlet(np.ones(count + 1), tokens)[:, :count]
    return {
        "teacher_top_ids": ids.astype(np.int32),
        "teacher_top_log_probs": np.log(shares).astype(np.float32),
    }


def teacher_tables(vocab_size: int, *, width: int = 6, seed: int = 9) -> tuple[Tensor, Tensor]:
    """A teacher's hidden states where a token is predicted, [vocab_size, width] by the token, and its
    output weight, of this shape too."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(2, vocab_size, width, generator=generator)
    return hidden, weight


def rollout_columns(
    samples: list[Sample], vocab_size: int, *, count: int = 4, seed: int = 8
) -> dict[str, np.ndarray]:
    """Columns of a batch of the samples, for score centering: distributions as those of a teacher,
    and advantages."""
    g = np.random.default_rng(seed)
    of_teacher = teacher_columns(samples, vocab_size, count=count, seed=seed)
    advantages = g.normal(size=len(of_teacher["teacher_top_ids"]))
    renamed = {name.replace("teacher", "rollout"): of_teacher[name] for name in of_teacher}
    return renamed | {"centering_advantages": advantages.astype(np.float32)}


def max_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference over all tensors of two dicts with the same keys."""
    assert set(a) == set(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def stack(values: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(values))
