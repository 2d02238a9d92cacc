"""Bugs of parallelism: who holds what, and which group sums it."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

PARALLELISM = (
    SeededBug(
        name="old log-probs in micro-batches of the whole rollout batch",
        file="megatron_gspo/loop/step_plan.py",
        before="return StepPlan(rules, replica, updates, first_epoch, costs)",
        after=(
            "return StepPlan(rules, replica, updates, plan_micro_batches(lengths, rules, replica),"
            " costs)"
        ),
        test="tests/loop/test_first_update.py::test_ratios_are_exactly_1_where_no_weight_has_changed[none]",
    ),
    SeededBug(
        name="replicas and micro-batches are balanced by tokens",
        file="megatron_gspo/loop/step_plan.py",
        before="plan_passes(lengths, epochs, rules, homes, costs=costs)",
        after="plan_passes(lengths, epochs, rules, homes)",
        test=(
            "tests/loop/test_step_plan.py::"
            "test_a_step_is_balanced_by_cost_and_keeps_the_branches_of_a_run_together"
        ),
    ),
    SeededBug(
        name="an exchange for level costs fills a micro-batch above the budget of tokens",
        file="megatron_gspo/data/schedule.py",
        before="-heavy.room <= longer <= light.room",
        after="True",
        test="tests/data/test_schedule.py::test_invariants_with_costs",
    ),
    SeededBug(
        name="updates score trained tokens alone, passes before them all",
        file="megatron_gspo/mcore/micro_batch_inputs.py",
        before="ScoredRows.of(shard.response_mask,",
        after="ScoredRows.of(shard.loss_mask if self._loss else shard.response_mask,",
        test="tests/loop/test_first_update.py::test_ratios_are_exactly_1_where_no_weight_has_changed[none]",
    ),
    SeededBug(
        name="the value head's gradient stays on its tensor-parallel rank",
        file="megatron_gspo/mcore/value_head.py",
        before="setattr(self.weight, 'sequence_parallel', config.sequence_parallel)",
        after="setattr(self.weight, 'sequence_parallel', False)",
        test="tests/mcore/test_value_steps.py::test_values_loss_and_gradients_in_every_layout",
    ),
    SeededBug(
        name="no sum over the context ranks",
        file="megatron_gspo/parallel/context_parallel.py",
        before=(
            "lambda x: sum_in_place(x.detach().clone(memory_format=torch.contiguous_format), group)"
        ),
        after="lambda x: x.detach().clone(memory_format=torch.contiguous_format)",
        test=(
            "tests/parallel/test_context_parallel.py::test_sum_over_adds_without_touching_its_input"
        ),
    ),
    SeededBug(
        name="gathered keys: gradient counted once for each rank",
        file="megatron_gspo/parallel/context_parallel.py",
        before="scatter_summed_rows(grad, ctx.group), None",
        after="scatter_summed_rows(grad, ctx.group) * group_size(ctx.group), None",
        test="tests/parallel/test_context_parallel.py::test_all_gather_tokens_and_its_gradient",
    ),
    SeededBug(
        name="context ranks own contiguous chunks where Megatron cuts in zigzag",
        file="megatron_gspo/parallel/context_parallel.py",
        before="second = starts + (2 * cp_size - 1 - cp_rank) * widths",
        after="second = starts + (cp_size + cp_rank) * widths",
        test="tests/parallel/test_context_parallel.py::test_worked_case",
    ),
    SeededBug(
        name="log-probs: no gradient on shards that don't own the label",
        file="megatron_gspo/parallel/log_probs.py",
        before="_row_factors(_columns(grad_log_probs), ",
        after=(
            "_row_factors(_columns(grad_log_probs * ((labels >= tiling.first) & (labels <"
            " tiling.first + tiling.rows))), "
        ),
        test="tests/parallel/test_log_probs.py::test_tensor_parallel_matches_log_softmax",
    ),
    SeededBug(
        name="log-probs in bfloat16",
        file="megatron_gspo/parallel/log_probs.py",
        before=(
            "torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)"
        ),
        after="torch.promote_types(hidden.dtype, weight.dtype)",
        test="tests/parallel/test_log_probs.py::test_bfloat16_inputs_give_float32_values",
    ),
    SeededBug(
        name="padding rows of the vocabulary counted in the softmax",
        file="megatron_gspo/parallel/log_probs.py",
        before="rows = min(max(options.vocab_size - first, 0), local_rows)",
        after="rows = local_rows",
        test="tests/parallel/test_log_probs.py::test_matches_log_softmax",
    ),
    SeededBug(
        name="kept logits overwritten by the next tile",
        file="megatron_gspo/parallel/vocabulary_tiles.py",
        before="logits = torch.empty_like(logits)",
        after="pass",
        test="tests/parallel/test_log_probs_limits.py::test_logits_that_are_kept_change_no_bit",
    ),
    SeededBug(
        name="largest values of a metric added up over ranks",
        file="megatron_gspo/parallel/metric_reduction.py",
        before="_sum(sums, local, group) | _extremes(minima, local, group)",
        after="_extremes(minima, local, group) | _sum(all_names, local, group)",
        test="tests/parallel/test_metric_reduction.py::test_sums_and_extremes_with_keys_that_ranks_lack",
    ),
    SeededBug(
        name="a rank without a metric makes its minimum 0",
        file="megatron_gspo/parallel/metric_reduction.py",
        before="smallest = local.of(is_minimum, absent=torch.inf)",
        after="smallest = local.of(is_minimum, absent=0.0)",
        test="tests/parallel/test_metric_reduction.py::test_sums_and_extremes_with_keys_that_ranks_lack",
    ),
    SeededBug(
        name="largest values of an update's metric added up over ranks",
        file="megatron_gspo/parallel/metric_reduction.py",
        before="reduce_metrics(numbered, group, reduction=_of_numbered)",
        after="reduce_metrics(numbered, group)",
        test="tests/parallel/test_metric_reduction.py::test_several_records_take_the_collectives_of_one",
    ),
    SeededBug(
        name="micro-batch average not undone",
        file="megatron_gspo/mcore/forward_step.py",
        before="loss * (num_microbatches * groups.dp.size())",
        after="loss * groups.dp.size()",
        test="tests/equivalence/test_layouts.py::test_dense[tp1-pp1-cp1-dp1]",
    ),
    SeededBug(
        name="expert gradients not added up over tensor-parallel replicas",
        file="patches/expert_gradients.py",
        before="parameter.allreduce = False",
        after="pass",
        test="tests/patches/test_expert_gradients.py::test_expert_gradients_are_added_up_over_tensor_parallel_replicas",
    ),
    SeededBug(
        name="experts are marked by our builder alone",
        file="patches/expert_gradients.py",
        before="mark_experts(module, config)",
        after="pass",
        test="tests/patches/test_expert_gradients.py::test_a_loop_of_ones_own_has_the_marks",
    ),
    SeededBug(
        name="experts of other tensor-parallel ranks left out of the gradient norm",
        file="patches/expert_gradients.py",
        before="parameter.tensor_model_parallel = True",
        after="pass",
        test=(
            "tests/patches/test_expert_gradients.py::test_every_expert_counts_in_the_gradient_norm"
        ),
    ),
    SeededBug(
        name="norm gradients not reduced under sequence parallelism",
        file="megatron_gspo/mcore/norms.py",
        before="self.weight.sequence_parallel = config.sequence_parallel",
        after="self.weight.sequence_parallel = False",
        test="tests/mcore/test_norms.py::test_norms_carry_the_mark_of_sequence_parallelism",
    ),
    SeededBug(
        name="router's auxiliary loss left on",
        file="megatron_gspo/mcore/model.py",
        before="moe_router_load_balancing_type='none', moe_aux_loss_coeff=0.0",
        after="moe_router_load_balancing_type='aux_loss', moe_aux_loss_coeff=0.001",
        test="tests/mcore/test_model.py::test_reinforcement_learning_sets_the_router",
    ),
    SeededBug(
        name="results of the first context rank alone",
        file="megatron_gspo/mcore/micro_batches.py",
        before="dist.all_reduce(flat, group=groups.cp)",
        after="dist.broadcast(flat, dist.get_global_rank(groups.cp, 0), groups.cp)",
        test="tests/mcore/test_micro_batches.py::test_every_response_token_comes_back_once_in_every_layout",
    ),
    SeededBug(
        name="positions under context parallelism counted by the rank",
        file="megatron_gspo/mcore/attention.py",
        before="return local_tokens - starts.repeat_interleave(lengths // self.cp_size)",
        after="return torch.cat([torch.arange(int(n)) for n in lengths // self.cp_size])",
        test="tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",
    ),
    SeededBug(
        name="gradient counted once for each context rank",
        file="megatron_gspo/mcore/forward_step.py",
        before="loss * (num_microbatches * groups.dp.size())",
        after="loss * (num_microbatches * groups.dp_cp.size())",
        test="tests/equivalence/test_layouts.py::test_dense[tp1-pp1-cp2-dp1]",
    ),
    SeededBug(
        name="tied embedding: the output's gradient is lost",
        file="megatron_gspo/mcore/forward_step.py",
        before="inner.shared_embedding_or_output_weight() if tied",
        after="inner.shared_embedding_or_output_weight().detach() if tied",
        test="tests/equivalence/test_layouts.py::test_tied_embeddings_and_padded_vocabulary[tp1-pp1-cp1-dp1]",
    ),
    SeededBug(
        name="gradients not reduced at the end of the backward pass",
        file="megatron_gspo/mcore/policy.py",
        before="config.finalize_model_grads_func = finalize_gradients",
        after="config.finalize_model_grads_func = None",
        test="tests/equivalence/test_layouts.py::test_dense[tp1-pp1-cp1-dp2]",
    ),
    SeededBug(
        name="every expert-parallel rank loads the first experts",
        file="megatron_gspo/mcore/hf_weights.py",
        before=(
            "expert = int(is_expert[2]) + groups.ep.rank() * (shape.num_experts //"
            " groups.ep.size())"
        ),
        after="expert = int(is_expert[2])",
        test="tests/equivalence/test_layouts.py::test_moe[tp1-pp1-cp1-dp2-ep2-etp1]",
    ),
)
