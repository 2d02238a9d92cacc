"""Every valid combination of parallel sizes up to two each, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from megatron_gspo.config import ParallelConfig
from tests.support.configs import parallel

RECOMPUTE = ("none", "selective", "full")
SCENARIO_NAMES = ("gspo", "gspo_token", "grpo")


@dataclass(frozen=True)
class Arrangement:
    """A layout with what ``ParallelConfig`` leaves to the world and to the model: data and sequence
    parallelism.

    ``outer``: embedding and loss count as layers; interleaved, one of the 4 + 2 to a chunk.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    interleaved: bool = False
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    moe: bool = True
    outer: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def is_valid(self) -> bool:
        """Megatron's constraints: experts have their own layout over the ranks of a pipeline stage;
        MoE layers with tensor parallelism need sequence parallelism, which needs tensor
        parallelism."""
        stage = self.tensor * self.context * self.data
        if self.interleaved and self.pipeline == 1 or self.sequence_parallel and self.tensor == 1:
            return False
        if not self.moe:
            return self.expert == self.expert_tensor == 1
        return stage % (self.expert * self.expert_tensor) == 0 and self.sequence_parallel == (
            self.tensor > 1
        )

    @property
    def name(self) -> str:
        """Such as ``tp2-pp2i-cp1-dp1-ep2-etp1``; ``i``: interleaved, ``o``: ``outer``, ``nosp``:
        without sequence parallelism."""
        tensor = f"tp{self.tensor}" + (
            "nosp" if self.tensor > 1 and not self.sequence_parallel else ""
        )
        pipeline = f"pp{self.pipeline}{'i' * self.interleaved}{'o' * self.outer}"
        common = f"{tensor}-{pipeline}-cp{self.context}-dp{self.data}"
        return common + (f"-ep{self.expert}-etp{self.expert_tensor}" if self.moe else "")

    def layout(self) -> ParallelConfig:
        chunks = (3 if self.outer else 2) if self.interleaved else None
        return parallel(
            tensor=self.tensor,
            pipeline=self.pipeline,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            virtual_pipeline=chunks,
            embedding_as_layer=self.outer,
            loss_as_layer=self.outer,
            sequence_parallel=self.sequence_parallel,
        )


def layouts(max_world: int = 8, *, moe: bool = True) -> list[Arrangement]:
    """All valid arrangements of at most ``max_world`` processes with every size 1 or 2, the
    smallest worlds first.
    """
    both = (1, 2)
    all_layouts = [
        Arrangement(
            tensor, sequence, pipeline, interleaved, context, data, expert, expert_tensor, moe
        )
        for pipeline, interleaved, tensor, sequence, context, data, expert, expert_tensor in (
            product(both, (False, True), both, (False, True), both, both, both, both)
        )
    ]
    valid = [a for a in all_layouts if a.is_valid and a.world_size <= max_world]
    return sorted(valid, key=lambda a: a.world_size)


@dataclass(frozen=True)
class Turn:
    """What an arrangement runs besides what all run: choices assigned round-robin, to keep the
    suite short.

    ``one_by_one``: the scenario that is also run with one sequence a micro-batch.
    ``distributed_optimizers``: with which the optimizer steps are taken, off and on.
    """

    recompute: str
    one_by_one: str
    distributed_optimizers: tuple[bool, ...]


def turn_of(arrangement: Arrangement, among: Sequence[Arrangement]) -> Turn:
    """By the place in a model's own list, so that every choice turns up with every size of every
    dimension there (see test_enumeration.py). By the place in the list of all, every third layout
    would have one and the same choice.
    """
    i = among.index(arrangement)
    both = arrangement.world_size <= 2
    return Turn(
        RECOMPUTE[i % 3],
        SCENARIO_NAMES[i // 3 % 3],
        (False, True) if both else ((i + i // 2) % 2 == 1,),
    )


MOE = layouts()
DENSE = layouts(moe=False)
# A third of the layouts for each of the other families with experts, not the same one, and two
# thirds for dense ones. `windows`, `moe_windows`: Qwen3 and Qwen3-MoE with YaRN, and windows in two
# layers and in all.
FAMILIES = {
    "deepseek": MOE[::3],
    "moonlight": MOE[1::3],
    "glm_lite": MOE[2::3],
    "glm": MOE[::-3],
    "gpt_oss": MOE[-2::-3],
    "next": MOE[-3::-3],
    "nemotron": MOE[::3],
    "minimax": MOE[1::3],
    "deepseek_v32": MOE[1::3],
    "glm_dsa": MOE[2::3],
    "windows": DENSE[::-3] + DENSE[-2::-3],
    "moe_windows": MOE[2::3],
}
# Qwen3.5, the language model of a model with images: with experts, and dense with tied embeddings.
LANGUAGE_MODELS = {"qwen35_moe": MOE[-1::-3], "qwen35": DENSE[::3] + DENSE[1::3]}
# Adapters; the names are those of `lora.ADAPTERS`.
LORA = {
    "lora_each": MOE[1::3],
    "lora_shared": MOE[2::6],
    "lora_some": DENSE[::5],
    "lora_router": MOE[4::9],
    "lora_latent": MOE[5::14],
    "lora_dense_parts": MOE[9::14],
    "lora_nemotron": [MOE[0], MOE[3], MOE[7]],  # one process, experts and tensors in two
}
# Every model that is measured, with its layouts.
MEASURED = {"moe": MOE, "dense": DENSE, **FAMILIES, **LANGUAGE_MODELS, **LORA}
