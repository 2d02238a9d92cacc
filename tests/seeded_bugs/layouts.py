"""Bugs of parallelism, conversion, Megatron's settings and resuming."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

LOG_PROBS, CONTEXT = "megatron_gspo/parallel/log_probs.py", "megatron_gspo/parallel/context_parallel.py"
MODEL, FORWARD = "megatron_gspo/mcore/model.py", "megatron_gspo/mcore/forward_step.py"
FILES = "megatron_gspo/mcore/checkpoint/checkpoint_files.py"
OWNED = "megatron_gspo/mcore/checkpoint/owned_state.py"
SAVE_LOAD = "tests/mcore/checkpoint/test_save_load.py::"
SOFTMAX = "tests/parallel/test_log_probs.py::test_matches_log_softmax"
LAYOUTS = "tests/equivalence/test_layouts.py::"
ALONE, CP2, DP2 = (LAYOUTS + f"test_dense[tp1-pp1-{rest}]" for rest in ("cp1-dp1", "cp2-dp1", "cp1-dp2"))
EP2 = LAYOUTS + "test_moe[tp1-pp1-cp1-dp2-ep2-etp1]"
SPLIT_SOFTMAX = "tests/parallel/test_log_probs.py::test_tensor_parallel_matches_log_softmax"

PARALLEL = (
    SeededBug(
        "no sum over the context ranks", "several trainers", CONTEXT,
        "return lambda x: sum_in_place(x.detach().clone(memory_format=torch.contiguous_format), group)",
        "return lambda x: x.detach().clone(memory_format=torch.contiguous_format)",
        ("tests/parallel/test_context_parallel.py::test_sum_over_adds_without_touching_its_input",),
    ),
    SeededBug(
        "gathered keys: a rank keeps its own gradient only", "one trainer", CONTEXT,
        "return scatter_summed_rows(grad, ctx.group), None",
        "return grad.chunk(group_size(ctx.group))[ctx.group.rank()].contiguous(), None",
        ("tests/parallel/test_context_parallel.py::test_all_gather_tokens_and_its_gradient",),
    ),
    SeededBug(
        "gathered keys: gradient counted once for each rank", "several trainers", CONTEXT,
        "return scatter_summed_rows(grad, ctx.group), None",
        "return scatter_summed_rows(grad, ctx.group) * group_size(ctx.group), None",
        ("tests/parallel/test_context_parallel.py::test_all_gather_tokens_and_its_gradient",),
    ),
    SeededBug(
        "context ranks own contiguous chunks where Megatron cuts in zigzag", "design", CONTEXT,
        "second = starts + (2 * cp_size - 1 - cp_rank) * widths", "second = starts + (cp_size + cp_rank) * widths",
        ("tests/parallel/test_context_parallel.py::test_worked_case",),
    ),
    SeededBug(
        "log-probs: no gradient on shards that don't own the label", "one Megatron trainer", LOG_PROBS,
        "        factors = _row_factors(grad_log_probs,",
        "        own = (labels >= tiling.first) & (labels < tiling.first + tiling.rows)\n"
        "        grad_log_probs = None if grad_log_probs is None else grad_log_probs * own\n"
        "        factors = _row_factors(grad_log_probs,",
        (SPLIT_SOFTMAX,),
    ),
    SeededBug(
        "log-probs: hidden gradient not summed over tensor ranks", "one Megatron trainer", LOG_PROBS,
        "return sum_in_place(grad, options.tp_group)", "return grad", (SPLIT_SOFTMAX,),
    ),
    SeededBug(
        "log-probs in bfloat16", "one trainer", LOG_PROBS,
        "dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)",
        "dtype = torch.promote_types(hidden.dtype, weight.dtype)",
        ("tests/parallel/test_log_probs.py::test_bfloat16_inputs_give_float32_values",),
    ),
    SeededBug(
        "temperature left out of the log-probs", "several trainers", LOG_PROBS,
        "scale=1.0 / options.temperature", "scale=1.0", (SOFTMAX,),
    ),
    SeededBug(
        "padding rows of the vocabulary counted in the softmax", "design", LOG_PROBS,
        "rows = min(max(options.vocab_size - first, 0), local_rows)", "rows = local_rows", (SOFTMAX,),
    ),
    SeededBug(
        "largest values of a metric added up over ranks", "design", "megatron_gspo/parallel/metric_reduction.py",
        'extremes = [name for name in all_names if name.endswith(("_max", "_min"))]\n'
        '    sums = [name for name in all_names if not name.endswith(("_max", "_min"))]',
        'extremes = [name for name in all_names if name.endswith("_min")]\n'
        '    sums = [name for name in all_names if not name.endswith("_min")]',
        ("tests/parallel/test_metric_reduction.py::test_sums_and_extremes_with_keys_that_ranks_lack",),
    ),
)  # fmt: skip

CONVERSION = (
    SeededBug(
        "a conversion writes into a directory with files", "design", "tools/convert/work_directory.py",
        "if out.exists() and not (out.is_dir() and not any(out.iterdir())):", "if out.is_file():",
        ("tests/tools/convert/test_work_directory.py::test_a_second_process_and_an_existing_output_are_refused",
         "tests/tools/convert/test_quantize.py::test_what_is_refused"),
    ),
    SeededBug(
        "gate and up projection exchanged", "design", "megatron_gspo/models/mapping_rules.py",
        "return torch.cat(list(parts), dim=0)", "return torch.cat(list(parts)[::-1], dim=0)",
        ("tests/models/test_mapping_rules.py::test_gate_lies_above_up",),
    ),
    SeededBug(
        "query, key and value laid one behind the other", "design", "megatron_gspo/models/mapping_rules.py",
        "return torch.cat(blocks, dim=1).reshape(-1, *query.shape[1:])", "return torch.cat([query, key, value], dim=0)",
        ("tests/models/test_mapping_rules.py::test_qkv_rows_lie_group_by_group",),
    ),
    SeededBug(
        "parameter without a rule dropped", "one converter", "megatron_gspo/mcore/hf_weights.py",
        'raise ValueError(f"no rule of family {family.model_type} matches the Megatron parameter {name}")', "continue",
        ("tests/mcore/test_hf_weights.py::test_broken_checkpoints_name_the_tensor",),
    ),
    SeededBug(
        "checkpoint tensors that the model doesn't use are passed over", "one converter",
        "megatron_gspo/models/families.py",
        "if extra := sorted(names - expected):", "if extra := sorted(expected - expected):",
        ("tests/models/test_families.py::test_missing_and_extra_names_are_told",),
    ),
)  # fmt: skip

MEGATRON = (
    SeededBug(
        "micro-batch average not undone", "design", FORWARD,
        "return loss * (num_microbatches * groups.dp.size())", "return loss * groups.dp.size()",
        ("tests/mcore/test_forward_step.py::test_per_token_loss_is_refused_and_the_share_is_scaled_once",),
    ),
    SeededBug(
        "expert gradients not added up over tensor-parallel replicas", "megatron-core 0.16.1 - 0.18.2", MODEL,
        "        expert_gradients.apply(chunk, config)\n", "",
        ("tests/patches/test_expert_gradients.py::test_expert_gradients_are_added_up_over_tensor_parallel_replicas",),
    ),
    SeededBug(
        "experts of other tensor-parallel ranks left out of the gradient norm", "megatron-core 0.16.1 - 0.18.2",
        "patches/expert_gradients.py",
        "            parameter.tensor_model_parallel = True  #", "            pass  #",
        ("tests/patches/test_expert_gradients.py::test_every_expert_counts_in_the_gradient_norm",),
    ),
    SeededBug(
        "interleaved stages exchange in batches", "megatron-core", MODEL,
        "overlap_p2p_comm=is_interleaved,\n"
        "        batch_p2p_comm=not is_interleaved,",
        "overlap_p2p_comm=False,\n        batch_p2p_comm=True,",
        ("tests/patches/test_patches.py::test_two_interleaved_stages_exchange_unbatched",),
    ),
    SeededBug(
        "norm gradients not reduced under sequence parallelism", "design", "megatron_gspo/mcore/norms.py",
        "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False",
        ("tests/mcore/test_norms.py::test_norms_carry_the_mark_of_sequence_parallelism",),
    ),
    SeededBug(
        "router's auxiliary loss left on", "two converters; TRL's default", MODEL,
        'moe_router_load_balancing_type="none",  # an auxiliary loss would add a term to the objective\n'
        "        moe_aux_loss_coeff=0.0,",
        'moe_router_load_balancing_type="aux_loss",\n        moe_aux_loss_coeff=0.001,',
        ("tests/mcore/test_model.py::test_reinforcement_learning_sets_the_router",),
    ),
    SeededBug(
        "softmax over all experts where it is over the chosen ones", "design", MODEL,
        'moe_router_pre_softmax=router.score == "softmax" and not router.normalize',
        'moe_router_pre_softmax=router.score == "softmax" and router.normalize',
        ("tests/mcore/test_model.py::test_softmax_comes_before_the_choice_where_its_values_are_not_normalised",),
    ),
    SeededBug(
        "per-token loss divides the objective again", "design", FORWARD,
        "if unwrap(model).config.calculate_per_token_loss:",
        "if unwrap(model).config.calculate_per_token_loss is None:",
        ("tests/mcore/test_forward_step.py::test_per_token_loss_is_refused_and_the_share_is_scaled_once",),
    ),
    SeededBug(
        "results of the first context rank alone", "design", "megatron_gspo/mcore/micro_batches.py",
        "dist.all_reduce(flat, group=groups.cp)", "dist.broadcast(flat, dist.get_global_rank(groups.cp, 0), groups.cp)",
        ("tests/mcore/test_micro_batches.py::test_every_response_token_comes_back_once_in_every_layout",),
    ),
    SeededBug(
        "positions under context parallelism counted by the rank", "several trainers",
        "megatron_gspo/mcore/attention.py",
        "return mine - starts.repeat_interleave(lengths // self.cp_size)",
        "return torch.cat([torch.arange(int(n)) for n in lengths // self.cp_size])",
        ("tests/mcore/test_attention.py::test_equals_attention_of_each_sequence_alone",),
    ),
)  # fmt: skip

LAYOUT = (
    SeededBug(
        "data-parallel average not undone", "design", FORWARD,
        "return loss * (num_microbatches * groups.dp.size())", "return loss * num_microbatches", (DP2,),
    ),
    SeededBug(
        "gradient counted once for each context rank", "several trainers", FORWARD,
        "return loss * (num_microbatches * groups.dp.size())", "return loss * (num_microbatches * groups.dp_cp.size())",
        (CP2,),
    ),
    SeededBug(
        "the ratio is not summed over the context ranks", "several trainers", FORWARD,
        "sum_over_context=sum_over(groups.cp),", "sum_over_context=None,", (CP2,),
    ),
    SeededBug(
        "micro-batches carry counts of their own", "three trainers", "megatron_gspo/mcore/micro_batches.py",
        "num_sequences=self._counts[0],", "num_sequences=max(len(self._rows[index]), 1),",
        (ALONE,),
    ),
    SeededBug(
        "temperature left out of the trained log-probs", "several trainers", FORWARD,
        "options = LogProbOptions(temperature, vocab_size, with_entropy=objective.entropy_coef != 0.0)",
        "options = LogProbOptions(1.0, vocab_size, with_entropy=objective.entropy_coef != 0.0)", (ALONE,),
    ),
    SeededBug(
        "tied embedding: the output's gradient is lost", "design", FORWARD,
        "weight = inner.shared_embedding_or_output_weight() if tied",
        "weight = inner.shared_embedding_or_output_weight().detach() if tied",
        (LAYOUTS + "test_tied_embeddings_and_padded_vocabulary[tp1-pp1-cp1-dp1]",),
    ),
    SeededBug(
        "gradients not reduced at the end of the backward pass", "design", "megatron_gspo/mcore/policy.py",
        "config.finalize_model_grads_func = finalize_gradients", "config.finalize_model_grads_func = None", (DP2,),
    ),
    SeededBug(
        "largest values of a metric added up over micro-batches", "design", "megatron_gspo/mcore/train_step.py",
        "return torch.maximum(a, b)", "return a + b", (ALONE,),
    ),
    SeededBug(
        "every expert-parallel rank loads the first experts", "design", "megatron_gspo/mcore/hf_weights.py",
        "expert = int(is_expert[2]) + groups.ep.rank() * (shape.num_experts // groups.ep.size())",
        "expert = int(is_expert[2])", (EP2,),
    ),
)  # fmt: skip

RESUME = (
    SeededBug(
        "every step samples with the same seed", "design", "megatron_gspo/loop/generation.py",
        "np.random.SeedSequence([seed, step])", "np.random.SeedSequence([seed])",
        ("tests/loop/test_generation.py::test_every_step_of_every_run_has_a_sampling_seed_of_its_own",),
    ),
    SeededBug(
        "the same mini-batches in every epoch", "design", "megatron_gspo/loop/step_plan.py",
        "np.random.default_rng([seed, step, epoch])", "np.random.default_rng([seed, step])",
        ("tests/loop/test_step_plan.py::test_mini_batches_are_a_partition_drawn_anew_each_step_and_epoch",),
    ),
    SeededBug(
        "all prompts are sampled with the same random numbers", "design",
        "megatron_gspo/rollout/embedded/token_sampling.py",
        "np.broadcast_arrays(position, sample & _WORD, prompt & _WORD, prompt >> _HALF)",
        "np.broadcast_arrays(position, sample & _WORD, prompt * 0, prompt * 0)",
        ("tests/rollout/embedded/test_token_sampling.py::test_uniforms_depend_on_seed_prompt_sample_and_position_alone",),
    ),
    SeededBug(
        "a resumed run reads its prompts from the beginning", "design", "megatron_gspo/loop/checkpoints.py",
        "state = LoopState(**load_checkpoint(policy, found))",
        'state = LoopState(**{**load_checkpoint(policy, found), "cursor": 0})',
        ("tests/train/test_run.py::test_a_resumed_run_ends_the_same",),
    ),
    SeededBug(
        "only the rank that got the signal stops", "design", "megatron_gspo/loop/stop_signal.py",
        "        dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n", "",
        ("tests/loop/test_stop_signal.py::test_all_ranks_give_the_same_answer",),
    ),
    SeededBug(
        "a resumed run loses Adam's state", "design", OWNED,
        '{f"optimizer.state.{name}.{part.key}": (values, state.start) for name, values in state.tensors.items()}',
        "{}", (SAVE_LOAD + "test_resumes_without_the_distributed_optimizer",),
    ),
    SeededBug(
        "a resumed run counts Adam's steps from 0", "megatron-core 0.16.1 - 0.19.2",
        "megatron_gspo/mcore/checkpoint/save_load.py",
        '        set_optimizer_step(model, steps[f"{prefix}optimizer"])\n', "",
        (SAVE_LOAD + "test_resumes_without_the_distributed_optimizer",),
    ),
    SeededBug(
        "a checkpoint holds what the previous one did", "design", "megatron_gspo/mcore/checkpoint/save_load.py",
        "        image.copy()\n", "", (SAVE_LOAD + "test_resumes_without_the_distributed_optimizer",),
    ),
    SeededBug(
        "a loaded rank keeps its old copy of what others read", "design", "megatron_gspo/mcore/checkpoint/save_load.py",
        "        model.gather_weights(always=True)\n", "",
        ("tests/mcore/checkpoint/test_megatron_format.py::test_earlier_checkpoints_are_loaded",),
    ),
    SeededBug(
        "every tensor-parallel rank writes a norm", "design", OWNED,
        "        if any(replica):\n            continue\n", "",
        ("tests/mcore/checkpoint/test_owned_state.py::test_the_ranks_divide_everything",),
    ),
    SeededBug(
        "a data-parallel rank writes another one's share", "design", OWNED,
        "for number in (copy, copy + 1))", "for number in (copies - 1, copies))",
        ("tests/mcore/checkpoint/test_owned_state.py::test_the_ranks_divide_everything",),
    ),
    SeededBug(
        "a rank's values are stored one place too early", "design", OWNED,
        "            at = begin - base\n", "            at = max(0, begin - base - 1)\n",
        ("tests/mcore/checkpoint/test_megatron_format.py::test_megatron_loads_ours",),
    ),
    SeededBug(
        "a shard that no rank wrote is not missed", "design", "megatron_gspo/mcore/checkpoint/metadata_file.py",
        "if len(wholes) > 1 or stored != math.prod(found[0].whole):", "if len(wholes) > 1:",
        ("tests/mcore/checkpoint/test_metadata_file.py::test_a_shard_that_is_missing_or_written_twice_is_refused",),
    ),
    SeededBug(
        "a half-written checkpoint is taken for a whole one", "several trainers", FILES,
        "if file.stat().st_size != size:", "if file.stat().st_size == 0 < size:",
        ("tests/mcore/checkpoint/test_checkpoint_files.py::test_a_damaged_checkpoint_is_passed_over_and_named",),
    ),
    SeededBug(
        "a killed run's writers and the next run's share a directory", "design", FILES,
        'partial = folder / f".partial_{step:06d}_{uuid.uuid4().hex[:8]}"',
        'partial = folder / f".partial_{step:06d}"',
        ("tests/mcore/checkpoint/test_checkpoint_files.py::test_a_killed_save_leaves_nothing_that_counts",),
    ),
)  # fmt: skip
