"""Bugs of low-rank adapters (LoRA): their scale, their cut over ranks, their sums, and what stays frozen."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ADAPTER, ATTACH = "megatron_gspo/mcore/lora/adapter.py", "megatron_gspo/mcore/lora/attach.py"
ADAPTER_WEIGHTS, POLICY = "megatron_gspo/mcore/lora/adapter_weights.py", "megatron_gspo/mcore/policy.py"
BY_HAND = ("tests/mcore/lora/test_adapter.py::test_the_product_and_the_merged_weight_are_those_of_a_loop",)
STREAMS = ("tests/mcore/lora/test_adapter_weights.py::test_streams_have_every_adapter_in_every_layout",)
MERGED = ("tests/mcore/lora/test_adapter_weights.py::test_merged_weights_are_those_of_peft",)
BASE = ("tests/mcore/lora/test_attach.py::test_the_base_is_there_with_adapters_off",)
REPLICAS = ("tests/mcore/lora/test_reduction.py::test_replicas_have_one_gradient",)
SENT = "tests/weight_transport/test_adapter_transport.py::test_"
TP2 = ("tests/equivalence/test_layouts.py::test_lora[lora_each-tp2-pp1-cp1-dp1-ep1-etp1]",)

ADAPTERS = (
    SeededBug(
        "servers get the adapters of one source alone", "design", "megatron_gspo/weight_transport/adapter_transport.py",
        "tensors = {name: tensor for part in parts for", "tensors = {name: tensor for part in parts[-1:] for",
        (f"{SENT}the_sources_files_become_one_in_peft_format",),
    ),
    SeededBug(
        "a server keeps its old adapters", "design", "megatron_gspo/rollout/vllm/vllm_weight_endpoints.py",
        '"load_inplace": True}', '"load_inplace": False}', (f"{SENT}vllm_loads_them_in_place_of_the_last_ones",),
    ),
    SeededBug(
        "requests ask for the base without its adapters", "design", "megatron_gspo/rollout/sglang/sglang_api.py",
        'if context.model.adapters else body', 'if not context.model else body',
        ("tests/rollout/server_engine/test_server_api.py::test_every_request_names_the_adapters",),
    ),
    SeededBug(
        "an adapter's product scaled twice", "several trainers", ADAPTER,
        "        b = b * self.scale\n", "        b = b * self.scale * self.scale\n", BY_HAND,
    ),
    SeededBug(
        "merged weights without an adapter's scale", "several trainers", "megatron_gspo/models/adapter_rules.py",
        "@ a.to(dtype)) * scale)", "@ a.to(dtype)))", BY_HAND,
    ),
    SeededBug(
        "rsLoRA's adapters converted with LoRA's scale", "several trainers", "megatron_gspo/models/peft_files.py",
        "adapter_scale(self.rank, self.alpha, self.rslora)", "adapter_scale(self.rank, self.alpha, False)",
        ("tests/models/test_peft_files.py::test_the_scale_by_hand",),
    ),
    SeededBug(
        "the engine gets weights without their adapters", "several trainers", "megatron_gspo/mcore/hf_weights.py",
        "return self.parameter if self.adapter is None else self.adapter.merged(self.parameter)",
        "return self.parameter", MERGED,
    ),
    SeededBug(
        "an adapter's gradient not summed over the ranks that hold it", "design",
        "megatron_gspo/mcore/lora/reduction.py", "        dist.all_reduce(flat, group=group)\n", "", REPLICAS,
    ),
    SeededBug(
        "an adapter's gradient not summed over sequence-parallel ranks", "design", ATTACH,
        "parameter.sequence_parallel = target.is_sequence_parallel", "parameter.sequence_parallel = False", TP2,
    ),
    SeededBug(
        "every rank loads the first part of an adapter", "design", ADAPTER_WEIGHTS,
        ".chunk(group.size(), dim=dim)[group.rank()]", ".chunk(group.size(), dim=dim)[0]", STREAMS,
    ),
    SeededBug(
        "B of gate and up cut as one in a checkpoint", "design", ADAPTER,
        'if getattr(self, "gated", False):', "if False:",
        ("tests/mcore/lora/test_attach.py::test_resume_is_exact_here_and_the_same_training_elsewhere",),
    ),
    SeededBug(
        "norms are trained beside the adapters", "design", ATTACH,
        "        chunk.requires_grad_(False)\n",
        "        for target in targets:\n            target.linear.requires_grad_(False)\n",
        ("tests/mcore/lora/test_reduction.py::test_nothing_else_has_a_gradient",),
    ),
    SeededBug(
        "the reference is scored with its adapters on", "several trainers", POLICY,
        "return adapters_off(self.chunks) if self.is_base else nullcontext()", "return nullcontext()", BASE,
    ),
    SeededBug(
        "a checkpoint of another base's adapters is loaded", "design",
        "megatron_gspo/mcore/checkpoint/checkpoint_files.py", "    if found == base:\n",
        "    if bool(found) == bool(base):\n", ("tests/mcore/lora/test_attach.py::test_other_checkpoints_are_refused",),
    ),
)  # fmt: skip
