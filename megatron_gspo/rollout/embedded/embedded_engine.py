"""The embedded engine: a Transformers model inside the training process. No server, no hub."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.errors import EngineError
from megatron_gspo.models.families import FAMILIES
from megatron_gspo.models.hf_checkpoint import CheckpointReader
from megatron_gspo.models.quantization.plan import dequantized
from megatron_gspo.rollout.embedded.cpu_kernels import use_cpu_kernels, use_decode_attention
from megatron_gspo.rollout.embedded.decode import DecodeBatch, Responses, decode
from megatron_gspo.rollout.embedded.kv_cache import is_served, kinds_of
from megatron_gspo.rollout.embedded.perturbed_routers import PerturbedRouters
from megatron_gspo.rollout.embedded.route_recorder import RouteRecorder
from megatron_gspo.rollout.embedded.selection_recorder import SelectionRecorder
from megatron_gspo.rollout.embedded.token_sampling import sequence_uniforms
from megatron_gspo.rollout.embedded.transformers_config import transformers_config
from megatron_gspo.rollout.embedded.weight_loading import WeightTargets
from megatron_gspo.rollout.engine_protocol import end_tokens
from megatron_gspo.rollout.response_text import ResponseDecoder, Tokenizer
from megatron_gspo.routing_replay.perturbation import Perturbation, PerturbedPass


class EmbeddedEngine:
    """`RolloutEngine` on a Transformers causal language model whose attention is full, has windows,
    is linear or sparse.

    Samples do not depend on how prompts are batched or distributed over engines, except for the
    rounding of matrix products of different shapes: a draw within about 1e-7 of a boundary may
    select the other token.
    """

    def __init__(
        self,
        source: str | Path | PretrainedConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        keep_special_tokens: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_batch: int = 256,
        return_routed_experts: bool = False,
        record_selections: bool = False,
        top_log_probs: int = 0,
    ) -> None:
        """Build the model.

        source: a local checkpoint folder, or a config: its weights come with the first
            `update_weights`.
        tokenizer: for `Sample.text` and an end token; without it the text is "".
        eos_token_ids: end tokens; default: those of the generation config, else the config, and the
            tokenizer's.
        keep_special_tokens: whether `Sample.text` has them; see `ResponseDecoder`.
        max_batch: sequences decoded at once.
        return_routed_experts: set `Sample.routed_experts`; for models with MoE layers.
        record_selections: fill `selections`; for models with sparse attention.
        top_log_probs: ids of `Sample.rollout_top_ids` per token; 0: none.

        Raises ValueError (one line) for a missing folder, another attention, no end token, routed
        experts of a dense model, or selections of full attention.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: decode at least 1 sequence at once")
        self.max_batch = max_batch
        self.model: Any = _build(source, dtype, torch.device(device))
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        configured = self.model.config.eos_token_id if configured is None else configured
        self.eos_token_ids = end_tokens(
            configured, tokenizer, self.model.config.vocab_size, given=eos_token_ids
        )
        self.decoder: ResponseDecoder | None = None
        if tokenizer is not None:
            self.decoder = ResponseDecoder(
                tokenizer, self.eos_token_ids, keep_special_tokens=keep_special_tokens
            )
        self._top_count = top_log_probs
        self._recorder = RouteRecorder(self.model) if return_routed_experts else None
        self._selection_recorder = SelectionRecorder(self.model) if record_selections else None
        self.selections: dict[tuple[int, int, int], np.ndarray] = {}
        """Of prompt index, sample index and position: what the last token that a response fed
        selected, [layers, topk] int32, ascending. Those since the last weights."""
        self._routers: PerturbedRouters | None = None
        self._perturbation: Perturbation | None = None
        self._targets: WeightTargets | None = WeightTargets.of(self.model)
        self.weight_version: int | None = None if isinstance(source, PretrainedConfig) else 0
        self._paused = False

    def perturb_routers(self, perturbation: Perturbation) -> None:
        """Choose experts by perturbed logits from now on.

        Raises ValueError for a model without softmax routers.
        """
        self._routers = PerturbedRouters(self.model)
        self._perturbation = perturbation

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int
    ) -> list[Sample]:
        """See `RolloutEngine.generate`. Prompts of similar length are decoded together."""
        self._check(prompts, sampling)
        if not prompts:
            return []
        if self._routers is not None and self._perturbation is not None:
            self._routers.start(PerturbedPass(self._perturbation, "rollout", seed))
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
        order = np.repeat(np.asarray(by_length), sampling.n_samples_per_prompt)
        sample_index = np.tile(np.arange(sampling.n_samples_per_prompt), len(prompts))
        num_batches = -(-len(order) // self.max_batch)
        samples: dict[int, Sample] = {}  # by position in the result
        for prompt_numbers, indices in zip(
            np.array_split(order, num_batches),
            np.array_split(sample_index, num_batches),
            strict=True,
        ):
            chosen = [prompts[i] for i in prompt_numbers]
            decoded = self._decode_batch(chosen, indices, sampling, seed)
            positions = prompt_numbers * sampling.n_samples_per_prompt + indices
            samples.update(zip(positions.tolist(), decoded, strict=True))
        return [samples[position] for position in range(len(order))]

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """See `RolloutEngine.update_weights`; weights in eight bits are dequantised. After an error
        `generate` refuses until one succeeds."""
        if self._targets is None:
            raise RuntimeError("update_weights after close: build a new EmbeddedEngine")
        self.weight_version = None
        self.selections = {}
        self._targets.write(dequantized(named_tensors))
        self.weight_version = version

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def close(self) -> None:
        """Drop the model and its memory."""
        self.model = None
        self._targets = None
        self._recorder = None
        self._selection_recorder = None
        self._routers = None
        self.weight_version = None

    def _check(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        if self.model is None:
            raise RuntimeError("generate after close: build a new EmbeddedEngine")
        if self._paused:
            raise RuntimeError("generate while paused: call resume first")
        if self.weight_version is None:
            raise RuntimeError(
                "the engine has no complete weights: call update_weights before generate"
            )
        vocabulary = self.model.config.vocab_size
        longest = getattr(self.model.config, "max_position_embeddings", None)
        for prompt in prompts:
            prompt.check()
            if prompt.token_ids.max() >= vocabulary:
                raise ValueError(
                    f"prompt {prompt.index}: token id {prompt.token_ids.max()} is outside the"
                    f" vocabulary of {vocabulary}: use the model's own tokenizer"
                )
            total = len(prompt.token_ids) + sampling.max_response_length
            if longest is not None and total > longest:
                raise ValueError(
                    f"prompt {prompt.index}: {len(prompt.token_ids)} tokens +"
                    f" max_response_length={sampling.max_response_length} exceed"
                    f" max_position_embeddings={longest}: shorten one"
                )

    def _decode_batch(
        self, prompts: list[Prompt], sample_index: np.ndarray, sampling: SamplingParams, seed: int
    ) -> list[Sample]:
        """One sample for each (prompts[i], sample_index[i]); the samples of a prompt are
        consecutive.
        """
        starts = [i for i, p in enumerate(prompts) if i == 0 or p is not prompts[i - 1]]
        begins_prompt = np.zeros(len(prompts), dtype=np.int64)
        begins_prompt[starts[1:]] = 1
        uniforms = None
        if not sampling.greedy:
            prompt_index = np.array([p.index for p in prompts])
            uniforms = sequence_uniforms(
                seed, prompt_index, sample_index, sampling.max_response_length
            )
        stop_ids = torch.tensor(self.eos_token_ids, device=self.model.device)
        distinct = [prompts[i] for i in starts]
        requests = DecodeBatch(
            prompts=[prompt.token_ids for prompt in distinct],
            prompt_of_row=begins_prompt.cumsum(),
            prompt_index=np.array([prompt.index for prompt in distinct]),
            sample_index=sample_index,
            uniforms=uniforms,
        )
        responses = decode(
            self.model,
            requests,
            sampling,
            stop_ids,
            self._recorder,
            self._routers,
            self._selection_recorder,
            top_count=self._top_count,
        )
        return self._samples(prompts, sample_index, responses)

    def _samples(
        self, prompts: list[Prompt], sample_index: np.ndarray, responses: Responses
    ) -> list[Sample]:
        assert self.weight_version is not None
        lengths = responses.lengths.tolist()
        ids = [row[:length] for row, length in zip(responses.tokens, lengths, strict=True)]
        texts = [""] * len(ids)
        if self.decoder is not None:
            texts = self.decoder.batch([row.tolist() for row in ids])
        samples = []
        for i, (prompt, response, length) in enumerate(zip(prompts, ids, lengths, strict=True)):
            log_probs = responses.log_probs[i, :length].copy()
            if not np.isfinite(log_probs).all():
                where = f"prompt {prompt.index}, weight version {self.weight_version}"
                raise EngineError(f"{where}: the log-probs are not finite; check the weights")
            top_ids = top_log_probs = None
            if self._top_count:
                top_ids = responses.top_ids[i, :length].copy()
                top_log_probs = responses.top_log_probs[i, :length].copy()
            support_lengths = support_ids = None
            if responses.supports is not None:
                support_lengths, support_ids = responses.supports[i]
            if (
                responses.selections is not None
                and (selected := responses.selections[i]) is not None
            ):
                last_fed = len(prompt.token_ids) + length - 2
                self.selections[prompt.index, int(sample_index[i]), last_fed] = selected
            samples.append(
                Sample(
                    prompt_index=prompt.index,
                    sample_index=int(sample_index[i]),
                    tokens=np.concatenate([prompt.token_ids, response]),
                    prompt_length=len(prompt.token_ids),
                    loss_mask=np.ones(length, dtype=bool),
                    rollout_log_probs=log_probs,
                    rollout_top_ids=top_ids,
                    rollout_top_log_probs=top_log_probs,
                    support_lengths=support_lengths,
                    support_ids=support_ids,
                    finish_reason="stop" if responses.stopped[i] else "length",
                    text=texts[i],
                    weight_version=self.weight_version,
                    routed_experts=None if responses.routes is None else responses.routes[i],
                )
            )
        return samples


def _build(
    source: str | Path | PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    if isinstance(source, PretrainedConfig):
        source = source.get_text_config()  # of a model that reads images too
        _refuse_others(source)
        # Of the published files; the weights come in the engine's dtype.
        if hasattr(source, "quantization_config"):
            source = copy.deepcopy(source)
            del source.quantization_config
        # Gated delta nets draw decay rates all the same.
        with no_init_weights(), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(source, dtype=dtype)
        model.tie_weights()  # part of the initialization
    else:
        if not (Path(source) / "config.json").is_file():
            raise ValueError(
                f"model folder {source} has no config.json: give a local Hugging Face checkpoint"
            )
        config = transformers_config(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, local_files_only=True, dtype=dtype
        )
        _refuse_others(model.config)
    _widen_bias(model, source)
    _unclamp_time_steps(model)
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        use_cpu_kernels(model)
    elif any(hasattr(module, "sinks") for module in model.modules()):
        # Transformers' own takes other masks.
        use_decode_attention(model)
    return model


def _widen_bias(model: PreTrainedModel, source: str | Path | PretrainedConfig) -> None:
    """Keep the bias of sigmoid routers in float32, to the bit: Transformers gives MiniMax-M2's
    the model's type.
    """
    rounded = {}
    for name, buffer in model.named_buffers():
        if name.endswith(".e_score_correction_bias") and buffer.dtype != torch.float32:
            buffer.data = buffer.data.float()
            rounded[name] = buffer
    if rounded and not isinstance(source, PretrainedConfig):
        name_in_transformers = FAMILIES[model.config.model_type].name_in_transformers
        with CheckpointReader(source) as reader:
            for stored in reader.names:
                bias = rounded.get(name_in_transformers(stored))
                if bias is not None:
                    bias.copy_(reader.read(stored))


def _unclamp_time_steps(model: PreTrainedModel) -> None:
    """Let Mamba-2 read a prompt as it decodes, and as the trainer and servers compute: Transformers
    raises small time steps in a pass over several tokens alone."""
    mixers: list[Any] = [each for each in model.modules() if hasattr(each, "time_step_limit")]
    for mixer in mixers:
        mixer.time_step_limit = (0.0, math.inf)


def _refuse_others(config: PretrainedConfig) -> None:
    if not is_served(config):
        raise ValueError(
            f"model type {config.model_type} has layers of {sorted(set(kinds_of(config)))}: the"
            " embedded engine serves full and sparse attention, windows, and linear attention beside"
            " them; use a server engine"
        )
