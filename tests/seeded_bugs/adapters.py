"""Bugs of low-rank adapters (LoRA): their scale, their cut over ranks, their sums, and what
stays frozen.
"""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ADAPTERS = (
    SeededBug(
        name="servers get the adapters of one source alone",
        file="megatron_gspo/weight_transport/adapter_transport.py",
        before="for file in files:",
        after="for file in files[-1:]:",
        test="tests/weight_transport/test_adapter_transport.py::test_the_sources_files_become_one_in_peft_format",
    ),
    SeededBug(
        name="a server keeps its old adapters",
        file="megatron_gspo/rollout/vllm/vllm_api.py",
        before="'load_inplace': True",
        after="'load_inplace': False",
        test="tests/weight_transport/test_adapter_transport.py::test_vllm_loads_them_in_place_of_the_last_ones",
    ),
    SeededBug(
        name="rsLoRA's adapters converted with LoRA's scale",
        file="megatron_gspo/models/peft_files.py",
        before="adapter_scale(self.rank, self.alpha, self.rslora)",
        after="adapter_scale(self.rank, self.alpha, False)",
        test="tests/models/test_peft_files.py::test_the_scale_by_hand",
    ),
    SeededBug(
        name="the engine gets weights without their adapters",
        file="megatron_gspo/mcore/hf_weights.py",
        before="self.parameter if self.adapter is None else self.adapter.merged(self.parameter)",
        after="self.parameter",
        test=(
            "tests/mcore/lora/test_adapter_weights.py::test_merged_weights_are_those_of_peft[each]"
        ),
    ),
    SeededBug(
        name="an adapter's gradient not summed over the ranks that hold it",
        file="megatron_gspo/mcore/lora/reduction.py",
        before="dist.all_reduce(flat, group=group)",
        after="pass",
        test="tests/mcore/lora/test_reduction.py::test_replicas_have_one_gradient",
    ),
    SeededBug(
        name="an adapter's gradient not summed over sequence-parallel ranks",
        file="megatron_gspo/mcore/lora/attach.py",
        before="parameter.sequence_parallel = target.is_sequence_parallel",
        after="parameter.sequence_parallel = False",
        test="tests/equivalence/test_layouts.py::test_lora[lora_each-tp2-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="every rank loads the first part of an adapter",
        file="megatron_gspo/mcore/lora/adapter_weights.py",
        before="chunk(group.size(), dim=dim)[group.rank()]",
        after="chunk(group.size(), dim=dim)[0]",
        test="tests/mcore/lora/test_adapter_weights.py::test_streams_have_every_adapter_in_every_layout[each]",
    ),
    SeededBug(
        name="norms are trained beside the adapters",
        file="megatron_gspo/mcore/lora/attach.py",
        before="chunk.requires_grad_(False)",
        after="[target.linear.requires_grad_(False) for target in targets]",
        test="tests/mcore/lora/test_reduction.py::test_nothing_else_has_a_gradient",
    ),
    SeededBug(
        name="the reference is scored with its adapters on",
        file="megatron_gspo/mcore/policy.py",
        before="adapters_off(self.chunks) if self.is_base else nullcontext()",
        after="nullcontext()",
        test="tests/mcore/lora/test_attach.py::test_the_base_is_there_with_adapters_off[each]",
    ),
    SeededBug(
        name="a checkpoint of another base's adapters is loaded",
        file="megatron_gspo/mcore/checkpoint/checkpoint_files.py",
        before="if stored_base == base:",
        after="if bool(stored_base) == bool(base):",
        test="tests/mcore/lora/test_attach.py::test_other_checkpoints_are_refused[each]",
    ),
)
