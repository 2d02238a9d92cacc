"""Bugs of the routers' bias over several ranks and in the embedded engine."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ENGINE = "megatron_gspo/rollout/embedded/embedded_engine.py"
ROUNDED = "tests/rollout/embedded/test_families.py::test_a_bias_stays_in_float32_to_the_bit_in_a_bfloat16_engine"

FAMILY_ENGINES = (
    SeededBug(
        "the update of the bias by the load of one rank", "design", "megatron_gspo/mcore/expert_bias.py",
        "router.local_tokens_per_expert += routing_map.sum(0)",
        "router.local_tokens_per_expert += routing_map.sum(0) * (torch.distributed.get_rank() == 0)",
        ("tests/mcore/test_expert_bias.py::test_an_update_rate_moves_it_towards_an_even_load",),
    ),
    SeededBug(
        "embedded engine: MiniMax-M2's bias in the type of the model", "Transformers", ENGINE,
        "    _widen_bias(model, source)\n", "", (ROUNDED,),
    ),
    SeededBug(
        "embedded engine: a bias widened after it was rounded", "design", ENGINE,
        "rounded[name].copy_(reader.read(stored))", "pass", (ROUNDED,),
    ),
)  # fmt: skip
