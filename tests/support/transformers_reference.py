"""The reference: Transformers in float64, one sequence at a time, objectives as loops, torch's
AdamW.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from megatron_gspo.algorithms import Distillation, Objective, ScoreCentering
from megatron_gspo.config import OptimizerConfig
from megatron_gspo.data.sample import Sample
from megatron_gspo.rollout.embedded.perturbed_routers import PerturbedRouters
from megatron_gspo.routing_replay.perturbation import PerturbedPass
from megatron_gspo.routing_replay.routes import expert_id_dtype
from tests.algorithms import reference as loops


class DoublePrecision(TorchFunctionMode):
    """Within this context no float64 tensor is converted to float32, as Transformers does in norms,
    softmaxes and the delta rule whatever the model's type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple([_not_float32(x) for x in args])
            kwargs = {name: _not_float32(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _not_float32(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


def load_reference(path: str) -> torch.nn.Module:
    """The Hugging Face model in float64, in all that it computes, experts one by one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    # Of a model with images.
    model.is_part = "text_config" in json.loads((Path(path) / "config.json").read_text())
    for name, parameter in model.named_parameters():  # some routers are kept in float32
        parameter.data = parameter.data.double()
        if ".indexer." in name:  # no gradient reaches it
            parameter.requires_grad_(False)
    forward = model.forward

    def in_double_precision(*args: Any, **kwargs: Any) -> Any:
        with DoublePrecision():
            return forward(*args, **kwargs)

    model.forward = in_double_precision
    return model.train()


def response_distributions(
    model: torch.nn.Module, sample: Sample, temperature: float = 1.0
) -> Tensor:
    """Log-probs of the whole vocabulary at the response tokens of a sample of one row, float64
    ``[R, V]``."""
    tokens = torch.from_numpy(sample.tokens)[None]
    with replayed(model, sample.routed_experts, sample.missing_routes):
        logits = model(input_ids=tokens, use_cache=False).logits[0, sample.prompt_length - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def response_log_probs(
    model: torch.nn.Module, sample: Sample, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs, over the support if the sample has one, and entropies of the response tokens,
    float64 ``[R]``; 0 for the first token of a later row, which nothing predicts."""
    if sample.row_lengths is not None:
        return _log_probs_of_rows(model, sample, temperature)
    log_softmax = response_distributions(model, sample, temperature)
    tokens = torch.from_numpy(sample.tokens)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    log_probs = log_softmax.gather(1, tokens[sample.prompt_length :, None])[:, 0]
    if sample.support_ids is not None:
        ends = np.cumsum(sample.support_lengths)[:-1]
        supports = np.split(sample.support_ids, ends)
        masses = [row[ids].exp().sum() for row, ids in zip(log_softmax, supports, strict=True)]
        log_probs = log_probs - torch.stack(masses).log()
    return log_probs, entropy


def _log_probs_of_rows(
    model: torch.nn.Module, sample: Sample, temperature: float
) -> tuple[Tensor, Tensor]:
    """Each row by itself."""
    log_probs = []
    entropies = []
    start = 0
    for length in sample.row_lengths.tolist():
        end = start + length
        routes = sample.routed_experts
        row = replace(
            sample,
            tokens=sample.tokens[start:end],
            prompt_length=sample.prompt_length if start == 0 else 1,
            routed_experts=None if routes is None else routes[start : end - 1],
            row_lengths=None,
        )
        if start > 0:
            log_probs.append(torch.zeros(1, dtype=torch.float64))
            entropies.append(torch.zeros(1, dtype=torch.float64))
        row_log_probs, row_entropy = response_log_probs(model, row, temperature)
        log_probs.append(row_log_probs)
        entropies.append(row_entropy)
        start = end
    return torch.cat(log_probs), torch.cat(entropies)


@torch.no_grad()
def all_log_probs(model: torch.nn.Module, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """[R, vocabulary] of all ids at a sample's response tokens, row by row; 0 where nothing
    predicts."""
    lengths = [sample.length] if sample.row_lengths is None else sample.row_lengths.tolist()
    values = np.zeros((sample.length, model.lm_head.weight.shape[0]))
    start = 0
    for length in lengths:
        tokens = torch.from_numpy(sample.tokens[start : start + length])[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0] / temperature
        values[start + 1 : start + length] = logits.log_softmax(-1)[:-1].numpy()
        start += length
    return values[sample.prompt_length :]


def response_divergence(
    model: torch.nn.Module,
    sample: Sample,
    temperature: float,
    distillation: Distillation,
    top_ids: np.ndarray,
    top_log_probs: np.ndarray,
) -> Tensor:
    """The divergence from a teacher at each response token, float64 ``[R]``, over the ids of the
    last two arguments ``[R, K]``: a loop."""
    log_softmax = response_distributions(model, sample, temperature)
    share = distillation.forward_weight
    values = []
    for row, ids, teacher in zip(
        log_softmax, top_ids.tolist(), top_log_probs.tolist(), strict=True
    ):
        total = torch.zeros((), dtype=torch.float64)
        for token, log_t in zip(ids, teacher, strict=True):
            p = row[token].exp()
            t = math.exp(log_t)
            total = total + (1 - share) * (p * (row[token] - log_t) - p + t)
            total = total + share * (t * (log_t - row[token]) - t + p)
        values.append(distillation.coef * total)
    return torch.stack(values)


def response_centering(
    model: torch.nn.Module,
    sample: Sample,
    temperature: float,
    weighing: ScoreCentering,
    top_ids: np.ndarray,
    top_log_probs: np.ndarray,
) -> Tensor:
    """The centering of each response token, float64 ``[R]``, over the ids of the last two arguments
    ``[R, K]``: a loop."""
    values = []
    for row, ids, log_q in zip(
        response_distributions(model, sample, temperature),
        top_ids.tolist(),
        top_log_probs.tolist(),
        strict=True,
    ):
        p = [math.exp(float(row.detach()[token])) for token in ids]
        q = [math.exp(value) for value in log_q]
        rho = (1 - sum(q)) / (1 - sum(p))
        alpha = rho * loops.centering_weight(weighing, 1 / rho)
        total = torch.zeros((), dtype=torch.float64)
        for k, token in enumerate(ids):
            weight = loops.centering_weight(weighing, p[k] / q[k])
            total = total + (q[k] * weight - alpha * p[k]) * row[token]
        values.append(total)
    return torch.stack(values)


def whole_batch(
    model: torch.nn.Module, samples: Sequence[Sample], temperature: float = 1.0
) -> loops.Batch:
    """All responses of a mini-batch end to end; ``log_probs`` and ``entropy`` carry their
    gradient to the model.
    """
    return joined(samples, score(model, samples, temperature))


def score(
    model: torch.nn.Module, samples: Sequence[Sample], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """`response_log_probs` of each sample."""
    return [response_log_probs(model, sample, temperature) for sample in samples]


def joined(samples: Sequence[Sample], scored: Sequence[tuple[Tensor, Tensor]]) -> loops.Batch:
    """The batch of samples whose log-probs and entropies are known."""

    def column(name: str) -> Tensor:
        return torch.from_numpy(
            np.concatenate([getattr(sample, name) for sample in samples]).astype(np.float64)
        )

    lengths = torch.tensor([sample.response_length for sample in samples])
    return loops.Batch(
        log_probs=torch.cat([log_probs for log_probs, _ in scored]),
        old_log_probs=column("old_log_probs"),
        rollout_log_probs=column(
            "old_log_probs" if samples[0].rollout_log_probs is None else "rollout_log_probs"
        ),
        ref_log_probs=column("ref_log_probs"),
        entropy=torch.cat([entropy for _, entropy in scored]),
        advantages=column("advantages"),
        loss_mask=column("loss_mask").float(),
        segment_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        num_segments=len(samples),
    )


def gates_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers, in the order of their layers."""
    return [
        module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
    ]


def is_sigmoid(gate: Any) -> bool:
    """Whether scores are sigmoids of the logits, and a bias is added for the choice."""
    return hasattr(gate, "e_score_correction_bias") or type(gate).__name__ == "MiniMaxM2TopKRouter"


def shares_of(gate: Any, logits: Tensor) -> Tensor:
    """The router's distribution over all experts, of which its entropy is taken."""
    if is_sigmoid(gate):
        return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    return torch.softmax(logits, dim=-1)


@contextmanager
def replayed(
    model: torch.nn.Module, routes: np.ndarray | None, missing: np.ndarray | None = None
) -> Iterator[None]:
    """Within the context the routers weigh the experts of ``routes`` ``[L - 1, layers, k]``, for
    one sequence of L, but for the rows of ``missing`` ``[L - 1]``, where they choose themselves."""
    if routes is None:
        yield
        return
    # The last token's doesn't matter.
    rows = torch.from_numpy(np.concatenate([routes, routes[:1]]).astype(np.int64))
    live = torch.zeros(len(rows), dtype=torch.bool)
    if missing is not None:
        live[:-1] = torch.from_numpy(missing)

    def weigh(
        layer: int, gate: Any, args: Any, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = output[0]
        ids = torch.where(live[:, None], output[2], rows[:, layer])
        scores = logits.sigmoid() if is_sigmoid(gate) else torch.softmax(logits, dim=-1)
        weights = scores.gather(1, ids)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights * getattr(gate, "routed_scaling_factor", 1.0), ids

    hooks = [
        gate.register_forward_hook(partial(weigh, layer))
        for layer, gate in enumerate(gates_of(model))
    ]
    yield
    for hook in hooks:
        hook.remove()


def give_random_routes(model: torch.nn.Module, samples: Sequence[Sample], seed: int) -> None:
    """Routes that any model of these sizes could have taken, a different set of experts for
    every token and layer.
    """
    g = np.random.default_rng(seed)
    layers = len(gates_of(model))
    experts = gates_of(model)[0].num_experts
    k = model.config.num_experts_per_tok
    for sample in samples:
        order = g.random((sample.length - 1, layers, experts)).argsort(-1)
        sample.routed_experts = order[..., :k].astype(expert_id_dtype(experts))


@dataclass(frozen=True)
class Routers:
    """What the routers do with samples: ``routes`` ``[L - 1, layers, k]`` of each; over trained
    tokens the mean ``entropy`` ``[layers]`` and the ``load`` ``[layers, experts]``, shares that sum
    to 1."""

    routes: list[np.ndarray]
    entropy: np.ndarray
    load: np.ndarray


def observe_routers(
    model: torch.nn.Module, samples: Sequence[Sample], noise: PerturbedPass | None = None
) -> Routers:
    """Run the model on each sample and count, token by token; with noise in its routers, if
    given.
    """
    noisy = None if noise is None else PerturbedRouters(model)
    gates = gates_of(model)
    experts = gates[0].num_experts
    routes = []
    entropy = np.zeros(len(gates))
    load = np.zeros((len(gates), experts))
    trained = 0
    seen: list[tuple[Tensor, ...]] = []
    hooks = [
        gate.register_forward_hook(lambda gate, args, output: seen.append(output)) for gate in gates
    ]
    for sample in samples:
        seen.clear()
        if noisy is not None and noise is not None:
            noisy.start(noise)
            name = (sample.prompt_index, sample.sample_index)
            positions = torch.arange(sample.length)
            noisy.set_tokens(torch.tensor([name]), torch.zeros_like(positions), positions)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False)
        routes.append(
            np.stack([ids.numpy()[:-1] for _, _, ids in seen], axis=1).astype(
                expert_id_dtype(experts)
            )
        )
        for position in np.flatnonzero(sample.loss_mask) + sample.prompt_length - 1:
            trained += 1
            for layer, (logits, _, ids) in enumerate(seen):
                p = shares_of(gates[layer], logits[position].double())
                entropy[layer] -= float((p * p.log()).sum())
                for expert in ids[position].tolist():
                    load[layer, expert] += 1
    for hook in [*hooks, *([] if noisy is None else [noisy])]:
        hook.remove()
    return Routers(routes, entropy / trained, load / load.sum(1, keepdims=True))


def without_gradient(batch: loops.Batch) -> loops.Batch:
    return replace(
        batch,
        log_probs=batch.log_probs.detach(),
        entropy=batch.entropy.detach(),
        divergence=None if batch.divergence is None else batch.divergence.detach(),
        centering=None if batch.centering is None else batch.centering.detach(),
    )


def naive_loss(
    objective: Objective,
    model: torch.nn.Module,
    samples: Sequence[Sample],
    temperature: float = 1.0,
) -> Tensor:
    """The negative objective of a whole mini-batch, as the papers write it: a loop over
    sequences and tokens.
    """
    batch = whole_batch(model, samples, temperature)
    return loops.naive_loss(objective, batch, batch.log_probs, batch.entropy)


def naive_metrics(objective: Objective, batch: loops.Batch) -> dict[str, float]:
    """Every figure that a training step reports of its loss, counted one by one."""
    batch = without_gradient(batch)
    terms = {
        key: getattr(objective, key) for key in ("kl_loss_coef", "entropy_coef", "log_ratio_coef")
    }

    alone = replace(batch, divergence=None, centering=None)

    def loss(batch: loops.Batch = alone, **coefficients: float) -> float:
        chosen = replace(objective, **{**dict.fromkeys(terms, 0.0), **coefficients})
        return float(loops.naive_loss(chosen, batch, batch.log_probs, batch.entropy))

    metrics = {"loss": loss(batch, **terms), "loss/policy": loss()}
    if batch.divergence is not None:
        metrics["loss/distillation"] = loss(replace(batch, centering=None)) - loss()
    if batch.centering is not None:
        metrics["loss/score_centering"] = loss(replace(batch, divergence=None)) - loss()
    names = {
        "kl_loss_coef": "loss/kl",
        "entropy_coef": "loss/entropy",
        "log_ratio_coef": "loss/log_ratio",
    }
    metrics |= {names[key]: loss(**{key: value}) - loss() for key, value in terms.items() if value}
    if objective.has_ratio:
        metrics |= loops.naive_metrics(objective, batch)
    else:
        metrics |= {
            f"clip_fraction/{what}": 0.0 for what in ("tokens", "sequences", "lower", "upper")
        }
        metrics["kl/ref"] = loops.naive_metrics(_with_a_ratio(objective), batch)["kl/ref"]
    if not objective.entropy_coef:
        # Costs a pass over the vocabulary: computed only where the objective needs it.
        metrics.pop("entropy", None)
    return metrics


def _with_a_ratio(objective: Objective) -> Objective:
    return replace(
        objective, name="any", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2
    )


def checkpoint_tensors(
    model: torch.nn.Module, value: Callable[[Tensor], Tensor], *, with_buffers: bool = True
) -> dict[str, Tensor]:
    """``value`` of every parameter, and of the routers' biases, under the names of a Hugging Face
    checkpoint, ``[whole tensor]`` each.

    Transformers fuses the experts in memory; here they are split as they are on disk. gpt-oss and
    the language model of a model with images have them fused there too; the latter's names say of
    what it is a part.
    """
    tensors: dict[str, Tensor] = {}
    is_part = getattr(model, "is_part", False)
    fused = is_part or any(
        name.endswith("gate_up_proj_bias") for name, _ in model.named_parameters()
    )
    biases = [
        (name, tensor)
        for name, tensor in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    ]
    for name, parameter in [*model.named_parameters(), *(biases if with_buffers else ())]:
        whole = value(parameter)
        if fused:
            tensors[name.replace("model.", "model.language_model.", 1) if is_part else name] = whole
        elif name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for e, both in enumerate(whole):
                gate, up = both.chunk(2, dim=0)
                tensors[f"{prefix}{e}.gate_proj.weight"], tensors[f"{prefix}{e}.up_proj.weight"] = (
                    gate,
                    up,
                )
        elif name.endswith((".experts.up_proj", ".experts.down_proj")):
            prefix, _, kind = name.rpartition(".")
            for e, of_expert in enumerate(whole):
                tensors[f"{prefix}.{e}.{kind}.weight"] = of_expert
        else:
            tensors[name] = whole
    return {stored_name(name, model.config.model_type): tensor for name, tensor in tensors.items()}


def stored_name(name: str, model_type: str) -> str:
    """The name in files; Transformers renames the tensors of MiniMax-M2 and Nemotron-3."""
    if model_type == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    if model_type == "minimax_m2":
        for own_name, stored in (
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ):
            name = name.replace(own_name, stored)
    return name


def checkpoint_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients under the names of a Hugging Face checkpoint; 0 where a parameter that is not frozen
    has none.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    tensors = checkpoint_tensors(
        model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad, with_buffers=False
    )
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter that is furthest off, and its error relative to the parameter's own norm.

    A parameter with (nearly) no gradient is measured against the typical norm, so that rounding
    noise isn't divided by zero.
    """
    assert set(actual) == set(expected), sorted(set(actual) ^ set(expected))[:3]
    norms = {name: float(value.norm()) for name, value in expected.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    errors = {
        name: float((actual[name].double() - expected[name]).norm()) / max(norms[name], floor)
        for name in expected
    }
    name = max(errors, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
    return name, errors[name]


@dataclass(frozen=True)
class Training:
    """What single-process training came to: each step's metrics and tokens; weights before, and
    after less before.
    """

    steps: list[dict[str, float]]
    before: dict[str, Tensor]
    update: dict[str, Tensor]
    batches: list[loops.Batch]


def naive_training(
    model: torch.nn.Module,
    objective: Objective,
    mini_batches: Sequence[Sequence[Sample]],
    settings: OptimizerConfig,
    total_steps: int,
    tensors: Callable[..., dict[str, Tensor]] = checkpoint_tensors,
) -> Training:
    """One AdamW step a mini-batch in float64, as Megatron defines it; the model is changed in
    place.

    Weight decay for matrices and the embedding, none for vectors (norms, biases); gradients scaled
    down to the global norm ``clip_grad``; the learning rate of `learning_rate`. ``tensors``: those
    that are compared.
    """
    before = tensors(model, lambda p: p.detach().clone())
    named = list(model.named_parameters())
    # Of all experts in one tensor.
    vectors = [p for name, p in named if p.dim() == 1 or name.endswith("_bias")]
    matrices = [p for name, p in named if p.dim() > 1 and not name.endswith("_bias")]
    adam = torch.optim.AdamW(
        [
            dict(params=matrices, weight_decay=settings.weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
    )
    steps = []
    batches = []
    for index, samples in enumerate(mini_batches):
        batch = whole_batch(model, samples)
        adam.zero_grad()
        loops.naive_loss(objective, batch, batch.log_probs, batch.entropy).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        for group in adam.param_groups:
            group["lr"] = learning_rate(settings, index, total_steps)
        adam.step()
        batches.append(without_gradient(batch))
        steps.append(
            {
                **naive_metrics(objective, batch),
                "grad_norm": float(norm),
                "lr": adam.param_groups[0]["lr"],
            }
        )
    after = tensors(model, lambda p: p.detach().clone())
    return Training(steps, before, {name: after[name] - before[name] for name in after}, batches)


def learning_rate(settings: OptimizerConfig, step: int, total_steps: int) -> float:
    """Of optimizer step 0, 1, ...: a linear warm-up that starts above 0, then a cosine down to
    ``min_lr``.
    """
    assert settings.lr_decay_style == "cosine"
    warmup = settings.lr_warmup_steps
    if step <= warmup:
        return settings.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / (total_steps - warmup)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2
