"""Mamba-2 over packed sequences of several chunks against a loop over tokens in float64, and that
loop against Transformers' module. Its layouts are in tests/equivalence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from megatron_gspo.mcore.chunk_layout import chunk_layout
from megatron_gspo.mcore.mamba2.layer import grouped_norm, mamba2
from megatron_gspo.models.model_shape import Mamba2Sizes
from tests.support.transformers_reference import DoublePrecision

SIZES = Mamba2Sizes(heads=6, head_size=3, groups=2, state_size=5, kernel=4)
LENGTHS = (8, 152, 1, 72, 64, 2)


def uniform(*sizes: int, low: float = -0.5, high: float = 0.5, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.empty(*sizes, dtype=torch.float64).uniform_(low, high, generator=g)


def parameters() -> dict[str, Tensor]:
    """Of the layer. Some heads have time steps of 1e-5, far below Transformers' least one."""
    channels = SIZES.groups * SIZES.convolved
    return dict(
        filters=uniform(channels, SIZES.kernel, seed=1),
        filter_bias=uniform(channels, seed=2),
        dt_bias=torch.tensor([-12.0, 0.3, -1.0, 0.5, -11.0, 0.0], dtype=torch.float64),
        log_rate=uniform(SIZES.heads, low=-1.5, seed=3),
        skip=uniform(SIZES.heads, seed=4),
    )


def loop(x: Tensor, least_step: float = 0.0, **weights: Tensor) -> Tensor:
    """[t, groups * values] of one sequence ``x`` [t, groups, exchanged], token by token."""
    heads = SIZES.heads_per_group
    filters = weights["filters"].view(SIZES.groups, SIZES.convolved, SIZES.kernel)
    bias = weights["filter_bias"].view(SIZES.groups, SIZES.convolved)
    state = x.new_zeros(SIZES.heads, SIZES.head_size, SIZES.state_size)
    outputs = []
    for t in range(len(x)):
        convolved = bias
        for j in range(SIZES.kernel):
            before = t + j - SIZES.kernel + 1
            if before >= 0:
                convolved = convolved + filters[:, :, j] * x[before, :, : SIZES.convolved]
        convolved = torch.nn.functional.silu(convolved)
        values, b, c = convolved.split((SIZES.values, SIZES.state_size, SIZES.state_size), dim=-1)
        step = x[t, :, SIZES.convolved :].flatten() + weights["dt_bias"]
        step = torch.nn.functional.softplus(step).clamp(min=least_step)
        values = values.reshape(SIZES.heads, SIZES.head_size)
        b, c = (shared.repeat_interleave(heads, dim=0) for shared in (b, c))
        decay = torch.exp(-step * weights["log_rate"].exp())
        state = decay[:, None, None] * state + (step[:, None] * values)[:, :, None] * b[:, None]
        out = (state * c[:, None]).sum(-1) + weights["skip"][:, None] * values
        outputs.append(out.flatten())
    return torch.stack(outputs)


def test_packed_sequences_equal_a_loop_over_each_alone():
    """Values and every gradient."""
    x = uniform(sum(LENGTHS), SIZES.groups, SIZES.exchanged, low=-2.0, high=2.0, seed=5)
    weights = parameters()
    leaves = [tensor.requires_grad_() for tensor in (x, *weights.values())]
    layout = chunk_layout(torch.tensor([0, *LENGTHS]).cumsum(0).int(), SIZES.kernel - 1)
    ours = mamba2(*leaves, layout, SIZES)
    expected = torch.cat([loop(sequence, **weights) for sequence in x.split(LENGTHS)])
    direction = uniform(*expected.shape, seed=6)
    for a, b in zip(
        (ours, *torch.autograd.grad((ours * direction).sum(), leaves)),
        (expected, *torch.autograd.grad((expected * direction).sum(), leaves)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_loop_is_transformers():
    config = NemotronHConfig(
        hidden_size=8,
        mamba_num_heads=SIZES.heads,
        mamba_head_dim=SIZES.head_size,
        n_groups=SIZES.groups,
        ssm_state_size=SIZES.state_size,
        chunk_size=16,
        layer_norm_epsilon=1e-3,
        hybrid_override_pattern="M",
    )
    theirs = NemotronHMamba2Mixer(config, 0).double()
    values = SIZES.groups * SIZES.values
    shared = SIZES.groups * SIZES.state_size
    weights = parameters()
    with torch.no_grad():
        # Theirs have all heads, then all B and all C.
        by_group = weights["filters"].view(SIZES.groups, -1, SIZES.kernel)
        split = (SIZES.values, SIZES.state_size, SIZES.state_size)
        rows = [part.flatten(0, 1) for part in by_group.split(split, dim=1)]
        theirs.conv1d.weight.copy_(torch.cat(rows)[:, None])
        biases = weights["filter_bias"].view(SIZES.groups, -1).split(split, dim=1)
        theirs.conv1d.bias.copy_(torch.cat([part.flatten() for part in biases]))
        theirs.dt_bias.copy_(weights["dt_bias"])
        theirs.A_log.copy_(weights["log_rate"])
        theirs.D.copy_(weights["skip"])
        theirs.norm.weight.copy_(uniform(values, low=0.5, high=1.5, seed=7))
        hidden = uniform(70, 8, low=-2.0, high=2.0, seed=8)
        with DoublePrecision():
            expected = theirs(hidden[None])[0]
        gate, *inputs = theirs.in_proj(hidden).split(
            (values, values, shared, shared, SIZES.heads), dim=-1
        )
        grouped = torch.cat([part.view(70, SIZES.groups, -1) for part in inputs], dim=-1)
        out = loop(grouped, least_step=config.time_step_min, **weights)
        normed = grouped_norm(
            out.view(70, SIZES.groups, -1),
            gate.view(70, SIZES.groups, -1),
            theirs.norm.weight.view(SIZES.groups, -1),
            config.layer_norm_epsilon,
        )
        torch.testing.assert_close(theirs.out_proj(normed.flatten(1)), expected)
