"""The torch modules that mix a layer's tokens, and gpt-oss's experts, beside Transformers' own with the same weights.

Each module gets the inputs that it has in its model: they are captured from a pass of one sequence. A turn is a forward
and a backward pass to its input and weights, on one core in float32. Both outputs are compared first. The last rows are
the growth of our time: the exponent of a power law through the times at all lengths, 1 where time is linear; and how
well a n + b n^2 fits them for n tokens, with both parts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.common import (
    Row,
    by_turns,
    count_row,
    hardware,
    interleave,
    run_from_command_line,
    say,
    time_row,
    timed,
    versions,
)
from benchmarks.scaling import exponent, linear_and_quadratic
from benchmarks.step_vs_megatron import tiny_policy
from tests.support.tiny_models import save_tiny_model

TARGET = 1.1  # of our time to Transformers'
LENGTHS = (512, 1024, 2048, 4096)
SIZES = dict(hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
             intermediate_size=64, max_position_embeddings=8192, initializer_range=0.02)  # fmt: skip
_LATENT = dict(kv_lora_rank=128, q_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, head_dim=32,
               num_key_value_heads=8)  # fmt: skip
_DELTA = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
              layer_types=["linear_attention", "full_attention"])  # fmt: skip
_WINDOW = dict(use_sliding_window=True, sliding_window=128, max_window_layers=0)
_EXPERTS = dict(intermediate_size=512, num_local_experts=8, num_experts_per_tok=2)
FITS = 0.1  # share of the times that a n + b n^2 may be off by, in the root mean square


@dataclass(frozen=True)
class Kind:
    """family: of `save_tiny_model`, with other sizes. layer: of the two whose module is timed; ours, theirs: its names
    in the layer. grows: the exponent that the time may have at most, 1 for linear and 2 for quadratic growth, with room
    for noise."""

    family: str
    sizes: dict[str, Any]
    layer: int = 0
    ours: str = "self_attention"
    theirs: str = "self_attn"
    grows: float = 2.05


KINDS = {
    "latent attention (DeepSeek-V3)": Kind("deepseek", _LATENT),
    "gated delta net (Qwen3-Next)": Kind("next", _DELTA, theirs="linear_attn", grows=1.1),
    "gated attention (Qwen3-Next)": Kind("next", _DELTA, layer=1),
    "attention, half rotated (GLM-4.5)": Kind("glm", {}),
    "norms over all heads (MiniMax-M2)": Kind("minimax", {}),
    "sinks and a window of 128 (gpt-oss)": Kind("gpt_oss", dict(sliding_window=128), grows=1.1),
    "sinks (gpt-oss)": Kind("gpt_oss", dict(sliding_window=128), layer=1),
    "a window of 128 (Qwen3)": Kind("dense", _WINDOW, grows=1.1),
    "router and experts (gpt-oss)": Kind("gpt_oss", _EXPERTS, ours="mlp", theirs="mlp", grows=1.1),
}


def inputs_of(module: nn.Module, run: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with in a pass."""
    calls: list[Any] = []
    hook = module.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    with torch.no_grad():
        run()
    hook.remove()
    return calls[0]


def step_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Tensor]:
    """Forward and backward of a module; returns its output, (tokens, hidden)."""
    hidden = args[0] if args else kwargs.pop("hidden_states")
    hidden = hidden.detach().clone().requires_grad_()
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    towards = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))

    def step() -> Tensor:
        found = module(hidden, *args[1:], **kwargs)
        output, bias = (*found, None)[:2] if isinstance(found, tuple) else (found, None)
        if isinstance(bias, nn.Parameter):  # Megatron's layer adds it
            output = output + bias
        torch.autograd.grad(output, [hidden, *weights], towards)
        return output.detach().reshape(-1, hidden.shape[-1])

    return step


def contestants(path: str, policy: Any, kind: Kind, length: int) -> dict[str, Callable[[], Tensor]]:
    """Both modules on the same tokens; their outputs agree."""
    from megatron_gspo.config import TrainingConfig
    from megatron_gspo.data.sample import Sample
    from megatron_gspo.data.sample_batch import SampleBatch
    from megatron_gspo.mcore.train_step import compute_log_probs

    tokens = np.random.default_rng(0).integers(3, policy.shape.vocab_size, size=length)
    mask = np.ones(length - 1, dtype=bool)
    batch = SampleBatch.of([Sample(0, 0, tokens, 1, mask, None, "stop")])
    training = TrainingConfig(steps=1, global_batch_size=1, max_tokens_per_micro_batch=length)
    ours = getattr(policy.chunks[0].module.decoder.layers[kind.layer], kind.ours)
    own = inputs_of(ours, lambda: compute_log_probs(policy, batch, training, temperature=1.0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = getattr(model.model.layers[kind.layer], kind.theirs)
    other = inputs_of(theirs, lambda: model(torch.as_tensor(tokens)[None], use_cache=False))
    steps = {"ours": step_of(ours, *own), "theirs": step_of(theirs, *other)}
    torch.testing.assert_close(steps["ours"]()[: length - 1], steps["theirs"]()[: length - 1], rtol=1e-3, atol=1e-5)
    return steps


def measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the table, and what they were measured on."""
    from megatron_gspo.config import ParallelConfig
    from megatron_gspo.mcore.process_groups import initialize

    torch.set_num_threads(1)
    machine = hardware()
    lengths = LENGTHS[:2] if args.quick else LENGTHS
    groups = initialize(ParallelConfig(), seed=0)
    rows, grown = [], []
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = save_tiny_model(folder, kind.family, **(SIZES | kind.sizes))
            policy = tiny_policy(path, ParallelConfig(), groups)
            steps = {length: contestants(path, policy, kind, length) for length in lengths}
        longest = steps[lengths[-1]]
        taken = interleave(longest, repeats=args.repeats, warmup=1, seconds=args.seconds / len(KINDS))
        say(f"mixers: {name}")
        rows.append(time_row("mixers", name, taken["ours"], taken["theirs"], peer_name="Transformers", target=TARGET,
                             note=f"{lengths[-1]:,} tokens, hidden size {SIZES['hidden_size']}"))  # fmt: skip
        times = by_turns({length: lambda step=steps[length]["ours"]: timed(step).cpu for length in lengths},
                         repeats=args.repeats, seconds=args.seconds / len(KINDS))  # fmt: skip
        medians = [statistics.median(times[length]) for length in lengths]
        found, _ = exponent(lengths, medians)
        grown.append(count_row("mixers", f"{name}: growth", found, 1.0, unit="exponent", peer_name="linear",
                               target=kind.grows, note=f"{lengths[0]:,} to {lengths[-1]:,} tokens"))  # fmt: skip
        linear, quadratic, left = linear_and_quadratic(lengths, medians)
        share = quadratic * lengths[-1] / (linear + quadratic * lengths[-1])
        note = (f"{1e6 * linear:.3g} us a token, {1e9 * quadratic:.3g} ns a token squared: {100 * share:.0f} % of the "
                f"time of {lengths[-1]:,} tokens")  # fmt: skip
        grown.append(count_row("mixers", f"{name}: off a n + b n^2", left, 1.0, unit="share", peer_name="the times",
                               target=FITS, note=note))  # fmt: skip
    return [*rows, *grown], {"hardware": machine, "versions": versions()}


def main() -> None:
    run_from_command_line(__doc__, measure, {"repeats": 7}, seconds=120)


if __name__ == "__main__":
    main()
