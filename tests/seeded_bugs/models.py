"""Bugs of the models' layers: attention, norms, routers' biases, gated delta nets and experts
with biases.
"""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

MODELS = (
    SeededBug(
        name="latent attention: each tensor-parallel rank with its own tokens' rotated key",
        file="megatron_gspo/mcore/latent_attention.py",
        before=(
            "turned = tensor_parallel.gather_from_sequence_parallel_region(turned,"
            " group=self.tp_group)"
        ),
        after="turned = turned.repeat(self.tp_group.size(), 1, 1)",
        test="tests/equivalence/test_layouts.py::test_family[deepseek-tp2-pp1-cp1-dp1-ep2-etp1]",
    ),
    SeededBug(
        name="sparse attention: positions selected across the bound of a packed sequence",
        file="megatron_gspo/mcore/indexer.py",
        before="keys = key[run.start:run.start + stop]",
        after="keys = key[:stop]",
        test=(
            "tests/mcore/test_sparse_attention.py::test_equals_loops_over_each_sequence_alone[1-1-deepseek_v32]"
        ),
    ),
    SeededBug(
        name="sparse attention: the indexer's pairs rotated as those of the attention",
        file="megatron_gspo/mcore/indexer.py",
        before="self.rotary = replace(shape.rotary, interleaved=sizes.interleaved)",
        after="self.rotary = replace(shape.rotary)",
        test=(
            "tests/mcore/test_sparse_attention.py::test_equals_loops_over_each_sequence_alone[1-1-deepseek_v32]"
        ),
    ),
    SeededBug(
        name="bias left at 0 when weights are loaded",
        file="megatron_gspo/mcore/hf_weights.py",
        before="mapped.rule is VALUE_HEAD and mapped.names[0] not in reader.names",
        after=(
            "mapped.rule.keeps_float32 or (mapped.rule is VALUE_HEAD and mapped.names[0] not in"
            " reader.names)"
        ),
        test="tests/mcore/test_expert_bias.py::test_it_is_frozen_and_keeps_its_bits_in_training_checkpoints_and_streams",
    ),
    SeededBug(
        name="experts chosen from all groups",
        file="megatron_gspo/mcore/model.py",
        before="router.chosen_groups if router.groups > 1",
        after="router.groups if router.groups > 1",
        test="tests/equivalence/test_layouts.py::test_family[deepseek-tp1-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="weights of experts from the scores with the bias",
        file="megatron_gspo/mcore/expert_bias.py",
        before="router.expert_bias.data = router.expert_bias.data.float()",
        after=(
            "router.register_forward_hook(lambda module, args, out: (out[0] + out[1] *"
            " module.expert_bias, out[1]))"
        ),
        test="tests/equivalence/test_layouts.py::test_family[deepseek-tp1-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="sinks left out of the softmax",
        file="megatron_gspo/mcore/attention.py",
        before="with_sink_key(key, value, mask)",
        after="(key, value, mask)",
        test="tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",
    ),
    SeededBug(
        name="the window ignored under context parallelism",
        file="megatron_gspo/mcore/attention.py",
        before="min(self.window, bucket.keys)",
        after="min(self.window, bucket.queries)",
        test="tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",
    ),
    SeededBug(
        name="the kernel's backward without the sink in its probabilities",
        file="megatron_gspo/mcore/sinks.py",
        before="ctx.save_for_backward(query, key, value, sinks, out, total)",
        after="ctx.save_for_backward(query, key, value, sinks, out, lse)",
        test="tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",
    ),
    SeededBug(
        name="the bias of linear_fc2 added by every expert-tensor rank",
        file="megatron_gspo/mcore/layers.py",
        before="down_bias_share=1 / self.tp_group.size()",
        after="down_bias_share=1.0",
        test="tests/equivalence/test_layouts.py::test_family[gpt_oss-tp1-pp1-cp1-dp2-ep1-etp2]",
    ),
    SeededBug(
        name="the window lost while decoding",
        file="megatron_gspo/rollout/embedded/decode.py",
        before="torch.arange(columns, device=device) >= columns - window",
        after="torch.arange(columns, device=device) >= 0",
        test="tests/rollout/embedded/test_embedded_engine.py::test_log_probs_equal_a_teacher_forced_pass[1.0-0-windows]",
    ),
    SeededBug(
        name="delta rule: no gradient of the decay from chunk to chunk",
        file="megatron_gspo/mcore/gated_delta_net/delta_rule.py",
        before="torch.linalg.vecdot(states.flatten(1), after.flatten(1)).view(decay.shape)",
        after="torch.zeros_like(decay)",
        test="tests/mcore/gated_delta_net/test_delta_rule.py::test_chunks_equal_the_recurrence",
    ),
    SeededBug(
        name="delta net: the convolution reads beyond the beginning of a sequence",
        file="megatron_gspo/mcore/chunk_layout.py",
        before=".index_fill_(0, layout.absent, 0.0)",
        after="",
        test="tests/mcore/gated_delta_net/test_layer.py::test_layer_equals_transformers",
    ),
    SeededBug(
        name="Mamba-2: the state goes on into the first chunk of the next packed sequence",
        file="megatron_gspo/mcore/mamba2/scan.py",
        before="states[:active[0]] = 0",
        after="states[:active[0]] = updates[:active[0]]",
        test=(
            "tests/mcore/mamba2/test_layer.py::test_packed_sequences_equal_a_loop_over_each_alone"
        ),
    ),
    SeededBug(
        name="Mamba-2: what a head writes by and what it reads by in each other's place",
        file="megatron_gspo/mcore/mamba2/layer.py",
        before="value, b, c = ",
        after="value, c, b = ",
        test=(
            "tests/mcore/mamba2/test_layer.py::test_packed_sequences_equal_a_loop_over_each_alone"
        ),
    ),
    SeededBug(
        name="Mamba-2: the blocks of rows of its projection in another order",
        file="megatron_gspo/models/nemotron.py",
        before="(sizes.groups * sizes.values, *convolved_blocks(shape), sizes.heads)",
        after="(*convolved_blocks(shape), sizes.groups * sizes.values, sizes.heads)",
        test="tests/equivalence/test_layouts.py::test_family[nemotron-tp1-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="delta net: every context-parallel rank with the first heads' filters",
        file="megatron_gspo/mcore/chunked_mixer.py",
        before="parameter.chunk(self.cp_group.size())[self.cp_group.rank()]",
        after="parameter.chunk(self.cp_group.size())[0]",
        test="tests/equivalence/test_layouts.py::test_family[next-tp1-pp1-cp2-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="delta net: the norm's gradient of one tensor-parallel rank's heads",
        file="megatron_gspo/mcore/gated_delta_net/layer.py",
        before="self.out_norm.weight.sequence_parallel = config.sequence_parallel",
        after="self.out_norm.weight.sequence_parallel = False",
        test="tests/equivalence/test_layouts.py::test_family[next-tp2-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="a zero-centred norm multiplies by its weight",
        file="megatron_gspo/mcore/norms.py",
        before="1.0 + self.weight.to(dtype)",
        after="self.weight.to(dtype)",
        test="tests/mcore/test_norms.py::test_a_zero_centred_norm_multiplies_by_one_more_than_its_weight",
    ),
    SeededBug(
        name="joint norm: the mean square of a tensor-parallel rank's own heads",
        file="megatron_gspo/mcore/joint_norms.py",
        before="_summed(torch.linalg.vecdot(wide, wide), group)",
        after="torch.linalg.vecdot(wide, wide).mul_(group.size())",
        test="tests/equivalence/test_layouts.py::test_family[minimax-tp2-pp1-cp1-dp1-ep1-etp1]",
    ),
    SeededBug(
        name="the update of the bias by the load of one rank",
        file="megatron_gspo/mcore/expert_bias.py",
        before="router.local_tokens_per_expert += routing_map.sum(0)",
        after=(
            "router.local_tokens_per_expert += routing_map.sum(0) * (torch.distributed.get_rank()"
            " == 0)"
        ),
        test=(
            "tests/mcore/test_expert_bias.py::test_an_update_rate_moves_it_towards_an_even_load[data"
            " 2-live]"
        ),
    ),
)
