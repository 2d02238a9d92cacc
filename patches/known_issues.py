"""Known issues of upstream packages: the source of the tables in README.md and of the doctor's
findings.

After a change: ``python -m megatron_gspo.patches.readme`` writes the tables.
"""

from __future__ import annotations

from megatron_gspo.patches.issue import KnownIssue, Situation
from megatron_gspo.patches.moe_retained_activations import DISPATCHERS


def applicable(situation: Situation) -> list[KnownIssue]:
    """The issues that apply to this situation."""
    return [issue for issue in KNOWN_ISSUES if issue.affects(situation)]


def _no_fused_adam(situation: Situation) -> bool:
    return not (situation.transformer_engine or situation.apex)


_DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher:"
_ON_CPU = "megatron-core 0.16.1 - 0.19.2 on a machine without CUDA"
_NO_ENGINE = "megatron-core 0.16.1 - 0.19.2 without Transformer Engine"
_ANY = "megatron-core 0.16.1 - 0.19.2"
_MARKS_EXPERTS = ("megatron.core.distributed:DistributedDataParallel.__init__",)

# Handled by a patch of this folder.
PATCHES = (
    KnownIssue(
        "`expert_gradients.py` (1)",
        "megatron-core 0.16.1 - 0.18.2",
        "TP > 1, EP = 1, expert-TP = 1: gradients of expert replicas are not reduced; silently"
        " wrong by more than 10 %",
        "[`tensor_parallel/layers.py`](mcore:tensor_parallel/layers.py#L886),"
        " [`RowParallelLinear`](mcore:tensor_parallel/layers.py#L1209); corrected by"
        " [#5916](mcore-pull:5916)",
        "`tests/patches/test_expert_gradients.py::test_expert_gradients_are_added_up_over_tensor_parallel_replicas`,"
        " `tests/equivalence/test_layouts.py::test_moe`",
        "the oldest supported version is 0.19",
        lambda s: s.has_experts and s.tensor > 1 and s.expert == 1 and s.expert_tensor == 1,
        marked=_MARKS_EXPERTS,
    ),
    KnownIssue(
        "`expert_gradients.py` (2)",
        "megatron-core 0.16.1 - 0.18.2 with Transformer Engine's grouped experts",
        "TP > 1, EP > 1, expert-TP = 1: experts of all but the first tensor-parallel rank are left"
        " out of the gradient norm, so clipping is too weak",
        "[`optimizer/clip_grads.py`](mcore:optimizer/clip_grads.py#L222),"
        " [`param_is_not_tensor_parallel_duplicate`](mcore:tensor_parallel/layers.py#L89);"
        " corrected by [#5916](mcore-pull:5916)",
        "`tests/patches/test_expert_gradients.py::test_every_expert_counts_in_the_gradient_norm`"
        " (the missing mark is set by hand: Transformer Engine needs a GPU)",
        "as above",
        lambda s: (
            s.has_experts
            and s.transformer_engine
            and s.tensor > 1
            and s.expert > 1
            and s.expert_tensor == 1
        ),
        marked=_MARKS_EXPERTS,
    ),
    KnownIssue(
        "`gradient_norm.py`",
        "megatron-core 0.16.1 - 0.19.2 without Transformer Engine and Apex",
        "the gradient norm reads the norm of each parameter's gradient back to the host: one"
        " synchronisation each in every optimizer step; clipping writes each gradient twice",
        "[`local_multi_tensor_l2_norm`](mcore:utils.py#L1200),"
        " [`local_multi_tensor_scale`](mcore:utils.py#L1212)",
        "`tests/patches/test_gradient_norm.py::test_the_norm_stays_on_the_device_and_upstreams_does_not`,"
        " `tests/patches/test_gradient_norm.py::test_clipping_makes_no_new_tensor_and_upstreams_does`",
        "upstream keeps the norms on the device and scales in place",
        _no_fused_adam,
        marked=(
            "megatron.core.optimizer.clip_grads:l2_norm_impl",
            "megatron.core.optimizer.clip_grads:multi_tensor_scale_impl",
        ),
    ),
    KnownIssue(
        "`gradient_accumulation.py`",
        "megatron-core 0.16.1 - 0.19.2 without Apex",
        "`gradient_accumulation_fusion` is refused without Apex's kernel, also where only the output"
        " layer is not Transformer Engine's",
        "[`ColumnParallelLinear`](mcore:tensor_parallel/layers.py#L924)",
        "`tests/mcore/test_megatron_options.py::test_options_that_change_how_and_not_what_is_computed`",
        "upstream multiplies by torch",
        lambda s: not s.apex,
        present=("megatron.core.tensor_parallel.layers:fused_weight_gradient_mlp_cuda",),
        is_issue=False,
    ),
    KnownIssue(
        "`te_general_gemm.py`",
        "megatron-core 0.16.1 without Transformer Engine",
        "a name is imported inside a `try` and used outside of it: `NameError` in the router's"
        " first forward pass",
        "[`transformer/moe/moe_utils.py`](mcore:transformer/moe/moe_utils.py#L1192)",
        "`tests/patches/test_megatron_on_cpu.py::test_the_router_runs_without_transformer_engine`",
        "the oldest supported version is 0.17",
        lambda s: not s.transformer_engine,
        present=("megatron.core.transformer.moe.moe_utils:te_general_gemm",),
    ),
    KnownIssue(
        "`megatron_on_cpu.py`",
        _ON_CPU,
        "device literals, streams, random state and parameter type names are CUDA's; where"
        " Transformer Engine or Apex is installed its optimizer kernels are called, and without a"
        " driver its import fails with another error than the `ImportError` that is expected",
        "many; for example"
        " [`distributed/param_and_grad_buffer.py`](mcore:distributed/param_and_grad_buffer.py#L783),"
        " [`tensor_parallel/random.py`](mcore:tensor_parallel/random.py#L64),"
        " [`optimizer/distrib_optimizer.py`](mcore:optimizer/distrib_optimizer.py#L361),"
        " [`optimizer/clip_grads.py`](mcore:optimizer/clip_grads.py#L10)",
        "`tests/patches/test_megatron_on_cpu.py::test_device_literals_mean_the_cpu`,"
        " `tests/patches/test_megatron_on_cpu.py::test_literals_fail_without_the_patch_and_where_cuda_is_available_it_changes_nothing`,"  # noqa: E501
        " `tests/patches/test_megatron_on_cpu.py::test_transformer_engine_is_not_imported_without_a_gpu`,"
        " `tests/patches/test_megatron_on_cpu_other_libraries.py`",
        "Megatron-Core takes its device from the tensors or the process group",
        lambda s: not s.gpu,
        marked=(
            "torch:cuda.current_device",
            "torch:empty",
            "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        ),
    ),
    KnownIssue(
        "`moe_uneven_collectives.py`",
        _ON_CPU + "; torch's gloo",
        "`all_to_all_single` refuses split sizes that are tensors; gloo refuses `all_gather` and"
        " `reduce_scatter` of parts of unequal size, which expert-tensor parallelism needs",
        "[`tensor_parallel/mappings.py`](mcore:tensor_parallel/mappings.py#L444), "
        "[`all_gather`](mcore:tensor_parallel/mappings.py#L150), "
        "[`reduce_scatter`](mcore:tensor_parallel/mappings.py#L193); "
        "[pytorch#156627](https://github.com/pytorch/pytorch/issues/156627)",
        "`tests/patches/test_moe_uneven_collectives.py::test_unequal_parts_are_exchanged`, "
        "`tests/patches/test_moe_uneven_collectives.py::test_gloo_refuses_unequal_parts_without_the_patch`",
        "the dispatcher converts the sizes and gloo supports unequal parts",
        lambda s: not s.gpu and s.has_experts and s.world_size > 1,
        marked=(
            "torch.distributed:all_to_all_single",
            "torch.distributed:all_gather",
            "torch.distributed:reduce_scatter",
        ),
    ),
    KnownIssue(
        "`moe_retained_activations.py`",
        _ANY,
        "MoE dispatchers keep the routing probabilities of the last pass: under full recomputation"
        " each layer's input and its gradient stay in memory after the backward pass, so the peak"
        " grows by two residual streams per layer",
        "[`transformer/moe/token_dispatcher.py`](mcore:transformer/moe/token_dispatcher.py#L610);"
        " reported in [#3221](mcore-issue:3221); [#5227](mcore-pull:5227) corrects it for DeepEP",
        "`tests/patches/test_moe_retained_activations.py::test_no_recomputed_layer_keeps_its_input_and_gradient`",
        "upstream releases them after combining",
        lambda s: s.has_experts,
        marked=tuple(_DISPATCHERS + f"{name}.combine_postprocess" for name in DISPATCHERS),
    ),
    KnownIssue(
        "`quiet.py`",
        _ANY,
        "not an error: every rank logs at start that Transformer Engine and Apex are missing, and"
        " future deprecations",
        "[`optimizer/clip_grads.py`](mcore:optimizer/clip_grads.py#L29)",
        "`tests/patches/test_quiet.py::test_only_the_named_messages_are_left_out`",
        "a message is no longer logged",
        lambda s: True,
        is_issue=False,
    ),
    KnownIssue(
        "`sglang_on_cpu/sitecustomize.py` (1)",
        "sglang 0.5.23 on a machine without a GPU",
        "imports `sgl_kernel`, whose build for CPUs is on no index: `ModuleNotFoundError`; its"
        " names are not called without CPU kernels",
        "[`kernels/ops/kvcache/cache_move.py`](sglang-0.5.23:kernels/ops/kvcache/cache_move.py#L10)",
        "`tests/sglang/test_patches.py::test_upstream_works_with_the_hook_and_fails_without`",
        "the wheel requires a build for CPUs, or does not import it",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    KnownIssue(
        "`sglang_on_cpu/sitecustomize.py` (2)",
        "sglang 0.5.15.post1 - 0.5.23 on a machine without a GPU",
        "the buffer of routed experts is pinned through CUDA on any device: the server fails at"
        " start",
        "[`BaseHostCache`](sglang-0.5.23:srt/state_capturer/base.py#L67), through torch until "
        "[#37285](sglang-pull:37285)",
        "`tests/sglang/test_patches.py::test_upstream_works_with_the_hook_and_fails_without`",
        "upstream pins for a GPU only",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    KnownIssue(
        "`sglang_on_cpu/sitecustomize.py` (3)",
        "sglang 0.5.15.post1 - 0.5.23 with torch's build for CPUs",
        "torchvision, which sglang imports, registers operators of a CUDA library that failed to"
        " load: `operator torchvision::nms does not exist`",
        "[`srt/utils/common.py`](sglang-0.5.15.post1:srt/utils/common.py#L94) imports it; "
        "[vision#9085](https://github.com/pytorch/vision/issues/9085)",
        "`tests/sglang/test_patches.py::test_upstream_works_with_the_hook_and_fails_without`",
        "torchvision registers only operators that it has, or has a build for CPUs on the index",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    KnownIssue(
        "`sglang_on_cpu/sitecustomize.py` (4)",
        "sglang 0.5.15.post1 - 0.5.23 on a machine without a GPU",
        "with `--enable-lora` layers and batches are pinned on any device, also by the torch"
        " backend: the server fails at start",
        "[`MergedColumnParallelLinearWithLoRA`](sglang-0.5.23:srt/lora/layers.py#L479), "
        "[`TorchNativeLoRABackend`](sglang-0.5.23:srt/lora/backend/torch_backend.py#L237)",
        "`tests/sglang/test_patches.py::test_upstream_works_with_the_hook_and_fails_without`",
        "upstream pins for a GPU only",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
)

# Handled by settings and code of the package; those of vLLM's worker replace its functions.
GUARDS = (
    KnownIssue(
        "`mcore/model.py`: `overlap_p2p_comm` on, `batch_p2p_comm` off under interleaving",
        _ANY,
        "with two interleaved stages both neighbours are one rank, and a batched exchange confuses"
        " activations and gradients: silently wrong",
        "[`pipeline_parallel/p2p_communication.py`](mcore:pipeline_parallel/p2p_communication.py#L16);"
        " [#750](mcore-issue:750)",
        "`tests/patches/test_patches.py::test_two_interleaved_stages_exchange_unbatched`",
        "the batched exchange distinguishes the directions",
        lambda s: s.virtual_pipeline > 1,
    ),
    KnownIssue(
        "`mcore/model.py`: `deallocate_pipeline_outputs` off under interleaving and on gloo",
        "megatron-core 0.16.1 - 0.17.1 (interleaving); all (gloo)",
        "an output is freed while it is still being sent",
        "[`pipeline_parallel/schedules.py`](mcore:pipeline_parallel/schedules.py#L154); corrected"
        " for interleaving by [#4047](mcore-pull:4047)",
        "`tests/mcore/test_model.py::test_sent_tensors_are_freed_only_where_the_schedule_waits_for_the_send`,"
        " `tests/equivalence/test_layouts.py`",
        "the oldest supported version is 0.18 (interleaving)",
        lambda s: (
            s.pipeline > 1 and (s.gloo or (s.virtual_pipeline > 1 and s.megatron[:2] < (0, 18)))
        ),
        all_versions=True,
    ),
    KnownIssue(
        "`mcore/norms.py`: `RMSNorm`",
        _NO_ENGINE,
        "the torch norm refuses sequence parallelism, which MoE with tensor parallelism needs",
        "[`transformer/torch_norm.py`](mcore:transformer/torch_norm.py#L32)",
        "`tests/mcore/test_norms.py::test_norms_carry_the_mark_of_sequence_parallelism`",
        "the torch norm marks its weight",
        lambda s: not s.transformer_engine and s.tensor > 1,
    ),
    KnownIssue(
        "`mcore/attention.py`: `PackedAttention`",
        _NO_ENGINE,
        "the torch attention refuses packed sequences and context parallelism",
        "[`transformer/dot_product_attention.py`](mcore:transformer/dot_product_attention.py#L57), "
        "[`forward`](mcore:transformer/dot_product_attention.py#L153)",
        "`tests/mcore/test_attention.py`",
        "the torch attention supports both",
        lambda s: not s.transformer_engine and s.has_config,
    ),
    KnownIssue(
        "`mcore/forward_step.py`: refuses `calculate_per_token_loss`",
        "all",
        "the schedule would divide a loss that is already normalised by the global batch",
        "[`pipeline_parallel/schedules.py`](mcore:pipeline_parallel/schedules.py#L259)",
        "`tests/mcore/test_forward_step.py::test_a_loss_per_token_is_refused_and_a_failure_leaves_no_trace`",
        "never",
        lambda s: True,
        is_issue=False,
    ),
    KnownIssue(
        "`mcore/routing_replay/router_hooks.py`: `RouterHook`, `refuse_bypasses`",
        _ANY,
        "a fused router returns before it calls the hook, so replay is silently off",
        "[`topk_routing_with_score_function`](mcore:transformer/moe/moe_utils.py#L652)",
        "`tests/mcore/routing_replay/test_router_hooks.py`",
        "a fused router supports routes or refuses them",
        lambda s: s.replay,
    ),
    KnownIssue(
        "`mcore/routing_replay/router_hooks.py`: routes with the micro-batch",
        _ANY,
        "`RouterReplay` keeps the routes of recomputations in a queue per layer: wrong if the"
        " backward has another order, and not emptied by a pass that fails; all models of a process"
        " share one list of routers",
        "[`RouterReplay.get_replay_topk`](mcore:transformer/moe/router_replay.py#L150)",
        "`tests/equivalence/test_layouts.py::test_moe` (recomputation in pipelines)",
        "upstream keys routes by micro-batch",
        lambda s: s.replay,
    ),
    KnownIssue(
        "`mcore/layers.py`: `_name_as_transformer_engine`",
        _NO_ENGINE,
        "the torch spec stores the norm before the experts under the name of a norm fused into a"
        " dense MLP: neither implementation loads the other's checkpoints",
        "[`get_gpt_layer_local_spec`](mcore:models/gpt/gpt_layer_specs.py#L306)",
        "`tests/mcore/checkpoint/test_checkpoint_metadata.py::"
        "test_the_norm_before_the_experts_has_transformer_engines_key`",
        "both specs use one name",
        lambda s: s.has_experts and not s.transformer_engine,
    ),
    KnownIssue(
        "`rollout/sglang/sglang_launch.py`: `--disable-overlap-schedule`",
        "sglang 0.5.15.post1 on a machine without a GPU (chosen below 0.5.23)",
        "the overlapped copy of routed experts is a view on a CPU, which the next step overwrites:"
        " more than half of the rows are silently wrong",
        "[`TopkCaptureOutput`](sglang-0.5.15.post1:srt/state_capturer/base.py#L179)",
        "`tests/rollout/sglang/test_sglang_launch.py::test_a_cpu_gets_what_it_needs`",
        "the oldest supported version copies it",
        lambda s: (
            bool(s.sglang) and s.sglang < (0, 5, 23) and s.starts_servers and s.servers_on_cpu
        ),
        all_versions=True,
    ),
    KnownIssue(
        "`rollout/sglang/response_parser.py`: `parse_input_scores`",
        "sglang 0.5.15.post1 - 0.5.23",
        "the last id of the vocabulary is reported as 0 among the scores of given tokens; its"
        " log-prob is right",
        "[`_process_input_token_logprobs`]"
        "(sglang-0.5.23:srt/managers/scheduler_components/logprob_result_processor.py#L54) compares"
        " with `vocab_size - 1`",
        "`tests/rollout/sglang/test_response_parser.py::test_log_probs_of_the_input`",
        "the last id comes back as itself",
        lambda s: bool(s.sglang),
    ),
    KnownIssue(
        "`rollout/vllm/worker_extension/megatron_gspo_worker.py`: `pack_reloaded_experts`",
        "vllm 0.32.0 - 0.33.0 on a machine without a GPU",
        "the kernel for CPUs packs the experts after the first load alone: after an update it reads"
        " unpacked weights, and log-probs are silently wrong",
        "[`_setup_kernel`](vllm-0.33.0:model_executor/layers/fused_moe/"
        "unquantized_fused_moe_method.py#L166)",
        "`tests/rollout/vllm/worker_extension/test_megatron_gspo_worker.py"
        "::test_experts_are_packed_once_after_every_load`,"
        " `tests/vllm/test_weights.py::test_an_update_gives_the_weights_of_its_version`",
        "`_setup_kernel` packs after an update too",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    KnownIssue(
        "`rollout/vllm/worker_extension/megatron_gspo_worker.py`: `undo_dropped_draws`",
        "vllm 0.32.0 - 0.33.0 on a machine without a GPU",
        "a draw for a prompt that is computed in parts is dropped by the offset of a generator,"
        " which generators on a CPU do not have: the server ends",
        "[`_bookkeeping_sync`](vllm-0.33.0:v1/worker/gpu_model_runner.py#L3468)",
        "`tests/rollout/vllm/worker_extension/test_megatron_gspo_worker.py"
        "::test_a_dropped_draw_is_drawn_again`",
        "`_bookkeeping_sync` does not call `get_offset` on a CPU",
        lambda s: s.starts_servers and s.servers_on_cpu,
    ),
    KnownIssue(
        "`servers/server_launch.py`: `server_environment`",
        "all",
        "a server that inherits `TORCHELASTIC_USE_AGENT_STORE` from torchrun's worker waits without"
        " a message for a store that does not exist",
        "[`init_distributed_environment`](sglang-0.5.23:srt/distributed/parallel_state.py#L2468)"
        " calls `torch.distributed.init_process_group`",
        "`tests/sglang/test_servers.py::test_servers_start_from_a_worker_of_torchrun`",
        "never",
        lambda s: s.starts_servers,
    ),
)

KNOWN_ISSUES = PATCHES + GUARDS
