"""What a rank of this config takes of its GPU, by the plan, against what the GPU has."""

from __future__ import annotations

from megatron_gspo.config import Config
from megatron_gspo.errors import show_bytes
from megatron_gspo.models import ModelShape
from megatron_gspo.tools.doctor.diagnostics import Finding, error, note, ok, warning
from megatron_gspo.tools.doctor.disk_space import DTYPE_BYTES
from megatron_gspo.tools.plan.assumptions import Assumptions
from megatron_gspo.tools.plan.hardware import GPUS
from megatron_gspo.tools.plan.layer_sizes import Setting
from megatron_gspo.tools.plan.memory import Memory, stage_states, worst_memory
from megatron_gspo.tools.plan.workload import Cluster, PlanInputs, Workload


def planned_memory(config: Config, shape: ModelShape, world_size: int, *, transformer_engine: bool = True) -> Memory:
    """Bytes on the fullest rank of a run of ``world_size`` GPUs, which the config's layout must divide."""
    model, rollout, training = config.model, config.rollout, config.training
    size = DTYPE_BYTES[model.dtype]
    lora = config.trained_lora
    own = model.implementation == "torch" or lora is not None or not transformer_engine
    layers = "torch" if own else "transformer_engine"
    work = Workload(
        rollout.max_response_length,
        config.data.max_prompt_length,
        rollout.rollout_batch_size,
        rollout.n_samples_per_prompt,
        training.global_batch_size,
        reference=config.algorithm.needs_reference,
        value_model=config.algorithm.needs_critic,
        routes=config.routing.replay != "none",
        dtype_bytes=size,
        implementation=layers,
        lora=lora,
    )
    of_servers = "colocated" if config.servers.colocated else "sglang"
    engine = {"embedded": "embedded", "sglang": of_servers, "vllm": of_servers}
    cluster = Cluster(GPUS["h100"], world_size, engine.get(rollout.engine, "none"))  # its memory is not looked at
    setting = Setting(size, layers, model.recompute_granularity, model.recompute_num_layers or 1, lora=lora)
    states = stage_states(shape, config.parallel, world_size, size, lora)
    sequences = max(training.global_batch_size // config.parallel.data_parallel_size(world_size), 1)
    tokens = training.max_tokens_per_micro_batch  # one sequence a micro-batch: as many of them as there can be
    inputs = PlanInputs(shape, work, cluster, Assumptions())
    return worst_memory(inputs, config.parallel, states, tokens, sequences, setting)


def judge_gpu_memory(memory: Memory, available: int | None) -> Finding:
    """available: bytes of a GPU, None where there is none to compare with. The weights' and optimizer's part is exact,
    the rest an estimate (docs/plan.md)."""
    check = "machine.gpu_memory"
    states = memory.weights + memory.gradients + memory.optimizer + memory.reference + memory.value_model
    text = (
        f"a rank takes {show_bytes(memory.total)} of its GPU by the plan: {show_bytes(states)} of weights, gradients "
        f"and optimizer, {show_bytes(memory.activations)} of activations, {show_bytes(memory.engine)} of the engine"
    )
    if available is None:
        return note(check, text, "", "compare it with your GPUs; megatron-gspo plan finds layouts")
    text = f"{text}; it has {show_bytes(available)}"
    fix = "split it over more GPUs (megatron-gspo plan finds layouts), recompute, or lower the token budget"
    if states + memory.engine > available:
        return error(check, text, "it can't hold them", fix)
    if memory.total > available:
        return warning(check, text, "it may run out of memory within the first steps", fix)
    return ok(check, text)
