"""Coarse memory and time of a layout, by a few formulas that rank layouts before the best are
rehearsed.

Memory is that of the fuller of the first and the last pipeline stage. Activations follow
Korthikanti et al. (arXiv: 2205.05198): a product with a weight keeps its input and its output, so
that the numbers that a layer keeps of a token grow with the weights that the token uses, over the
hidden size. Time is that of FLOPs over the share of the GPU's peak that is reached, bytes over
links, and the pipeline's bubble. Every response is as long as the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_gspo.config import Config, ParallelConfig
from megatron_gspo.gpus import Gpu
from megatron_gspo.models.flops import forward_flops, indexer_weights
from megatron_gspo.models.model_shape import ModelShape
from megatron_gspo.tools.plan.parameters import (
    embedding_parameters,
    layer_parameters,
)

GRADIENT_BYTES = 4  # accumulated and reduced in float32
MOMENT_BYTES = 8  # Adam's two moments, float32
MASTER_BYTES = 4  # float32 copies of bfloat16 weights
DELTA_NET = 7  # what a gated delta net, or Mamba-2, keeps over what its products would: it computes in float32
LABEL_BYTES = 52  # of an id of a token whose log-prob the head computes; as rehearsed
# Rows of an expert in a micro-batch with which its products reach half of their speed (assumed).
HALF_ROWS = 256


@dataclass(frozen=True)
class Hardware:
    """gpus: that train. efficiency, link_efficiency: reached shares of a GPU's peak FLOPs and
    of its links.
    """

    gpu: Gpu
    gpus: int
    efficiency: float
    link_efficiency: float

    @property
    def flops(self) -> float:
        return self.gpu.flops * self.efficiency

    def rate(self, span: float) -> float:
        """Bytes a second that a rank gets in a group whose ranks lie within ``span`` consecutive
        ones: over NVLink within a node, else over the network."""
        return self.link_efficiency * (
            self.gpu.nvlink if span <= self.gpu.node else self.gpu.network
        )


@dataclass(frozen=True)
class Choice:
    """What a plan chooses: a layout, ``model.recompute_granularity`` and
    ``training.max_tokens_per_micro_batch``.
    """

    parallel: ParallelConfig
    recompute: str
    max_tokens: int


@dataclass(frozen=True)
class Estimate:
    """What one choice takes: bytes of the fuller stage, and seconds of an optimizer step with the
    log-probs before it.
    """

    choice: Choice
    micro_batches: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    compute: float
    communication: float
    bubble: float

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble


@dataclass(frozen=True)
class Estimator:
    """The formulas for one model, config and cluster. The config's own layout is not looked at."""

    shape: ModelShape
    config: Config
    hardware: Hardware

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length

    def padded_length(self, parallel: ParallelConfig) -> int:
        """Tokens of a sequence as it is packed alone."""
        return -(-self.longest // parallel.total_multiple) * parallel.total_multiple

    def estimate(self, choice: Choice) -> Estimate:
        parallel = choice.parallel
        replicas = parallel.data_parallel_size(self.hardware.gpus)
        sequences = -(-self.config.training.global_batch_size // replicas)
        packed = max(choice.max_tokens // self.padded_length(parallel), 1)
        micro_batches = -(-sequences // packed)
        if parallel.virtual_pipeline_model_parallel_size:  # whole rounds of the stages
            stages = parallel.pipeline_model_parallel_size
            micro_batches = -(-micro_batches // stages) * stages
        weights, gradients, optimizer = self.states(parallel)
        tokens = min(packed, sequences) * self.longest
        compute = self.compute_seconds(choice, tokens)
        communication = self.communication_seconds(choice, sequences * self.longest)
        stages = parallel.pipeline_model_parallel_size
        chunks = parallel.virtual_pipeline_model_parallel_size or 1
        bubble = (compute + communication) * (stages - 1) / (chunks * micro_batches)
        activations = self.activation_bytes(choice, tokens, micro_batches)
        return Estimate(
            choice,
            micro_batches,
            weights,
            gradients,
            optimizer,
            activations,
            compute,
            communication,
            bubble,
        )

    @cached_property
    def _layers(self) -> tuple[float, float, float]:
        """Parameters of a layer on average: dense ones, routed experts', and those that a token
        uses.
        """
        layers = [layer_parameters(self.shape, layer) for layer in range(self.shape.num_layers)]
        dense = sum(layer.dense for layer in layers) / len(layers)
        experts = sum(layer.experts for layer in layers) / len(layers)
        chosen = self.shape.experts_per_token / max(self.shape.num_experts, 1)
        return dense, experts, dense + experts * chosen

    @cached_property
    def _kept_weights(self) -> float:
        """Weights that a token uses in a layer on average, by what their products keep for the
        backward.
        """
        mixers = self.shape.mixers
        delta_nets = sum(
            layer_parameters(self.shape, layer).attention
            for layer, mixer in enumerate(mixers)
            if mixer in ("gated_delta_net", "mamba2")
        )
        return self._layers[2] + (DELTA_NET - 1) * delta_nets / len(mixers)

    def layers_of_stage(self, parallel: ParallelConfig) -> int:
        return -(
            -(self.shape.num_layers + parallel.extra_pipeline_layers)
            // parallel.pipeline_model_parallel_size
        )

    def parameters_of_rank(self, parallel: ParallelConfig) -> tuple[float, float]:
        """Dense and expert parameters of a rank of the first or the last stage."""
        dense, experts, _ = self._layers
        layers = self.layers_of_stage(parallel)
        tensor = parallel.tensor_model_parallel_size
        tables = 1 if self.shape.tied_embeddings or parallel.pipeline_model_parallel_size > 1 else 2
        split = parallel.expert_model_parallel_size * parallel.expert_tensor_size
        return (
            layers * dense + tables * embedding_parameters(self.shape)
        ) / tensor, layers * experts / split

    def _data_ranks(self, parallel: ParallelConfig) -> tuple[int, int]:
        """Ranks that hold the same dense and the same expert parameters."""
        stage = self.hardware.gpus // parallel.pipeline_model_parallel_size
        experts = parallel.expert_model_parallel_size * parallel.expert_tensor_size
        return stage // parallel.tensor_model_parallel_size, stage // experts

    @property
    def _weight_bytes(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else 4

    def states(self, parallel: ParallelConfig) -> tuple[float, float, float]:
        """Bytes of weights, gradients and optimizer. Of adapters only the frozen weights count; a
        value model is as large as the policy. Indexers are not trained."""
        parameters = self.parameters_of_rank(parallel)
        tensor = parallel.tensor_model_parallel_size
        frozen = self.layers_of_stage(parallel) * indexer_weights(self.shape) / tensor
        trained = (parameters[0] - frozen, parameters[1])
        weights = self._weight_bytes * sum(parameters)
        if self.config.lora.is_on:
            return weights, 0.0, 0.0
        policies = 2 if self.config.algorithm.needs_critic else 1
        of_parameter = MOMENT_BYTES + (MASTER_BYTES if self._weight_bytes < 4 else 0)
        shards = self._data_ranks(parallel) if parallel.use_distributed_optimizer else (1, 1)
        optimizer = sum(
            of_parameter * count / ranks for count, ranks in zip(trained, shards, strict=True)
        )
        gradients = GRADIENT_BYTES * sum(trained)
        copies = policies + self.config.algorithm.needs_reference
        return copies * weights, policies * gradients, policies * optimizer

    def activation_bytes(self, choice: Choice, tokens: int, micro_batches: int) -> float:
        """What a stage keeps for the backward passes, and the most that one of them adds: a layer's
        gradients with those of its experts' weights, and the output layer's."""
        parallel = choice.parallel
        shape = self.shape
        hidden = self.shape.hidden_size
        tensor = parallel.tensor_model_parallel_size
        split = parallel.context_parallel_size
        own = tokens / split / tensor
        chosen = shape.experts_per_token if shape.is_moe else 0
        layer = (
            own * self._weight_bytes * ((4 + chosen) * hidden + 1.5 * self._kept_weights / hidden)
        )
        kept = own * self._weight_bytes * hidden if choice.recompute == "full" else layer
        stages = parallel.pipeline_model_parallel_size
        chunks = parallel.virtual_pipeline_model_parallel_size
        ahead = stages if chunks is None else (2 * stages - 1 + (chunks - 1) * stages) / chunks
        in_flight = min(ahead, micro_batches)
        experts = self._layers[1] / (
            parallel.expert_model_parallel_size * parallel.expert_tensor_size
        )
        working = (2 if choice.recompute == "full" else 1) * layer
        if not self.config.lora.is_on:
            working += 4 * experts
        responses = tokens / split * self._response_share
        head = (
            10 * tokens / split * hidden / tensor
            + self._weight_bytes * embedding_parameters(shape) / tensor
            + LABEL_BYTES * responses * max(self._labels)
        )
        first = in_flight * self.layers_of_stage(parallel) * kept + working
        last = self.layers_of_stage(parallel) * kept + max(working, head)
        return max(first, last if stages > 1 else first - working + max(working, head))

    @property
    def _labels(self) -> tuple[int, int]:
        """Ids of a response token whose log-probs a pass without a gradient computes, and a pass of
        an update: the token, those that could be drawn, and the most likely ones of the rollout
        engine and of a teacher.
        """
        scored = 1 + self.config.rollout.max_support
        most_likely = self.config.algorithm.score_centering + self.config.distillation.num_ids
        return scored, scored + most_likely

    @property
    def _response_share(self) -> float:
        """The response's share of a sequence's tokens."""
        return self.config.rollout.max_response_length / self.longest

    def passes(self, recompute: str) -> tuple[float, float]:
        """A token's passes through the model in a step, as forward passes: products, and exchanges
        between ranks.
        """
        algorithm = self.config.algorithm
        full = recompute == "full"
        scored = 1 + algorithm.needs_reference + algorithm.needs_critic
        trained = 2 if algorithm.needs_critic else 1
        products = 2 if self.config.lora.is_on else 3  # frozen weights have no gradient
        return scored + trained * (products + full), scored + trained * (2 + full)

    def compute_seconds(self, choice: Choice, tokens: int) -> float:
        """tokens: of a replica's micro-batch; experts that get few of them are slow."""
        shape = self.shape
        length = self.longest
        parallel = choice.parallel
        response = self.config.rollout.max_response_length
        forward = forward_flops(shape, np.array([length]), np.array([response]))
        work = float(forward.total[0]) / length
        if shape.is_moe:
            of_rank = tokens / parallel.context_parallel_size / parallel.tensor_model_parallel_size
            ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_size
            rows = of_rank * ranks * shape.experts_per_token / shape.num_experts
            dense, _, used = self._layers
            work += 2 * shape.num_layers * (used - dense) * HALF_ROWS / rows
        flops = (
            self.config.training.global_batch_size
            * length
            * work
            * self.passes(choice.recompute)[0]
        )
        return flops / (self.hardware.gpus * self.hardware.flops)

    def _ranks_of_token(self, parallel: ParallelConfig) -> float:
        """How many ranks have some of a token's experts, if these are drawn at random."""
        count, chosen = self.shape.num_experts, self.shape.experts_per_token
        ranks = parallel.expert_model_parallel_size
        none = math.comb(count - count // ranks, chosen) / math.comb(count, chosen)
        return ranks * (1 - none) * parallel.expert_tensor_size

    def communication_seconds(self, choice: Choice, tokens: float) -> float:
        """Seconds of communication of a rank whose replica has so many tokens of the step.

        Nothing is hidden behind products.
        """
        parallel = choice.parallel
        shape = self.shape
        hardware = self.hardware
        tensor = parallel.tensor_model_parallel_size
        context = parallel.context_parallel_size
        experts = parallel.expert_model_parallel_size * parallel.expert_tensor_size
        layers = self.layers_of_stage(parallel)
        size = self._weight_bytes
        # Bytes of one number of each token in each layer.
        of_rank = layers * size * tokens / context
        seconds = of_rank * 4 * shape.hidden_size * (tensor - 1) / tensor / hardware.rate(tensor)
        if experts > 1 and shape.is_moe:
            sent = of_rank / tensor * 2 * self._ranks_of_token(parallel) * shape.hidden_size
            far = max(0.0, 1 - hardware.gpu.node / experts)
            near = max(0.0, (experts - 1) / experts - far)
            seconds += sent * (near / hardware.rate(1) + far / hardware.rate(math.inf))
        if context > 1:
            keys = 2 * max(shape.num_query_groups / tensor, 1) * shape.head_dim
            seconds += of_rank * keys * (context - 1) / hardware.rate(context * tensor)
        # Hidden states to and from the neighbours of each chunk.
        if parallel.pipeline_model_parallel_size > 1:
            chunks = parallel.virtual_pipeline_model_parallel_size or 1
            stage = hardware.gpus // parallel.pipeline_model_parallel_size
            seconds += (
                2
                * chunks
                * size
                * tokens
                / context
                / tensor
                * shape.hidden_size
                / hardware.rate(stage + 1)
            )
        seconds *= self.passes(choice.recompute)[1]
        # From each other tensor-parallel rank the head gets float32 numbers of each response token:
        # maximum, sum, entropy, and those of the labels.
        scored, trained = self._labels
        numbers = (1 + self.config.algorithm.needs_reference) * (3 + scored) + 3 + trained
        responses = tokens / context * self._response_share
        seconds += 4 * numbers * responses * (tensor - 1) / hardware.rate(tensor)
        if self.config.lora.is_on:
            return seconds
        span = hardware.gpus // parallel.pipeline_model_parallel_size
        for count, ranks in zip(
            self.parameters_of_rank(parallel), self._data_ranks(parallel), strict=True
        ):
            seconds += (GRADIENT_BYTES + size) * count * (ranks - 1) / ranks / hardware.rate(span)
        return seconds
