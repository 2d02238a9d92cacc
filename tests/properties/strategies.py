"""What the properties draw: structure by hypothesis (so that it shrinks), numbers from a seed
that it draws.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from megatron_gspo.algorithms import PRESETS, Objective, preset
from tests.algorithms.reference import Batch, complete_preset
from tests.algorithms.test_policy_loss import CASES

EXTREME = torch.tensor(
    [float("nan"), float("inf"), -float("inf"), 1e30, -1e30], dtype=torch.float64
)
VALUES = (
    "log_probs",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "entropy",
    "advantages",
)

OBJECTIVES: dict[str, Objective] = {
    **{name: objective for name, (objective, _) in CASES.items()},
    **{
        f"{name}_all_terms": complete_preset(name, kl_loss_coef=0.05, entropy_coef=0.01)
        for name in PRESETS
    },
    "gspo_token_constant": preset(
        "gspo_token",
        loss_agg_mode="seq-mean-token-sum-norm",
        loss_scale_factor=7,
        allow_nonstandard=True,
    ),
    "clamped_early": preset("grpo", max_log_ratio=0.5),
    "gspo_clamped_early": preset("gspo", max_log_ratio=0.01),
}
OF_SEQUENCES = sorted(
    name
    for name, objective in OBJECTIVES.items()
    if objective.importance_sampling_level == "sequence"
)
# Half of the examples have a ratio of sequences, as a fifth of the objectives: only these
# can go wrong where a sequence is cut.
objectives = st.one_of(st.sampled_from(OF_SEQUENCES), st.sampled_from(sorted(OBJECTIVES))).map(
    OBJECTIVES.__getitem__
)


@st.composite
def batches(draw, *, per_token: bool | None = None, drifts=(0.0, 5e-4, 0.2, 3.0)) -> Batch:
    """One to seven sequences of 0 to 9 positions, in pieces that need not be contiguous; any mask,
    also all zero; NaN and infinity at untrained positions. Advantages by token or by sequence.
    """
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    if draw(st.booleans()):
        ids = ids[torch.tensor(draw(st.permutations(range(len(ids)))), dtype=torch.long)]
    total = len(ids)
    mask = torch.tensor(
        draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=torch.float32
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(n: int = total) -> torch.Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    drift = draw(st.sampled_from(drifts))
    old = -normal().abs() - 0.05
    log_probs = old + drift * (normal(len(lengths))[ids] + normal())
    by_token = draw(st.booleans()) if per_token is None else per_token
    advantages = normal() if by_token else normal(len(lengths))[ids]
    ref = log_probs + 0.5 * normal()
    engine = old + 0.5 * normal()
    batch = Batch(log_probs, old, engine, ref, normal().abs(), advantages, mask, ids, len(lengths))
    return poisoned(batch, shift=0)


def poisoned(batch: Batch, *, shift: int) -> Batch:
    """The same with extreme values, others for another `shift`, at untrained positions."""
    holes = (batch.loss_mask == 0).nonzero().flatten()
    values = {name: getattr(batch, name).clone() for name in VALUES}
    for i, value in enumerate(values.values()):
        value[holes] = EXTREME[(torch.arange(len(holes)) + i + shift) % len(EXTREME)]
    return Batch(
        **values,
        loss_mask=batch.loss_mask,
        segment_ids=batch.segment_ids,
        num_segments=batch.num_segments,
    )


def integers_each(count: int, highest: int) -> st.SearchStrategy[list[int]]:
    """`count` integers of 0 .. highest."""
    return st.lists(st.integers(0, highest), min_size=count, max_size=count)
