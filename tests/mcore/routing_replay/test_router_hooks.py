"""Routing replay at the routers: what it refuses, what it fixes and which gradients remain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megatron_gspo.data.packing import pack
from megatron_gspo.data.sample import Sample
from megatron_gspo.data.training_batch import TrainingBatch
from megatron_gspo.mcore.micro_batches import MicroBatches
from megatron_gspo.mcore.model import transformer_config
from megatron_gspo.mcore.policy import Policy
from megatron_gspo.mcore.routing_replay.micro_batch_routes import (
    MicroBatchRoutes,
    RoutingError,
    routes_of_mini_batch,
)
from megatron_gspo.mcore.routing_replay.replay_options import ReplayOptions
from megatron_gspo.mcore.routing_replay.router_hooks import refuse_bypasses, router_hooks
from megatron_gspo.mcore.train_step import compute_log_probs, forward_backward, train_mini_batch
from tests.mcore.test_model import shape_of as model_shape
from tests.support.configs import micro_batches_of, model_config, parallel
from tests.support.distributed import run_distributed
from tests.support.gathered import by_sample
from tests.support.routing_cases import (
    GRPO,
    around_routing,
    distance,
    policy_of,
    routers,
    run_pass,
    scored_samples,
    shape_of,
    train_pass,
    with_random_routes,
)
from tests.support.samples import trained_only
from tests.support.tiny_models import save_tiny_model
from tests.support.transformers_reference import (
    gates_of,
    load_reference,
    naive_loss,
    response_log_probs,
    worst_error,
)

BATCHING = micro_batches_of(80)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "two", num_hidden_layers=3, mlp_only_layers=[1]
    )


Routing = Callable[..., Any]  # of a router

BYPASSED = [
    ("moe_router_fusion", True),
    ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
    ("moe_expert_capacity_factor", 1.0),
    ("moe_input_jitter_eps", 1e-3),
    ("recompute_modules", ["core_attn", "moe"]),
    ("cuda_graph_scope", ["attn", "moe_router"]),
]
ASKING = [
    ("moe_router_load_balancing_type", ["aux_loss", "seq_aux_loss"]),
    ("recompute_modules", ["core_attn", "moe_act", "shared_experts"]),
    ("cuda_graph_scope", ["attn"]),
]


@pytest.mark.parametrize(("key", "value"), BYPASSED, ids=str)
def test_an_option_that_bypasses_the_hook_is_refused_by_its_key(key, value):
    config = transformer_config(model_shape(), parallel(), model_config())
    refuse_bypasses(config)
    setattr(config, key, value)
    with pytest.raises(RoutingError) as caught:
        router_hooks(SimpleNamespace(config=config))
    assert str(caught.value) == f"{key}={value} bypasses routing replay; leave it at its default"


@pytest.mark.parametrize(("key", "value"), ASKING, ids=str)
def test_settings_that_still_ask_are_allowed(key, value):
    config = transformer_config(model_shape(), parallel(), model_config())
    setattr(config, key, value)
    refuse_bypasses(config)


def bypass(routing: Routing) -> Routing:
    """As a fused router: Megatron's own choice, no hook."""
    return lambda logits, *args, **kwargs: topk_routing_with_score_function(
        logits.view(-1, logits.shape[-1]), 2
    )


def twice(routing: Routing) -> Routing:
    def ask(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        routing(logits, *args, **kwargs)
        return routing(logits, *args, **kwargs)

    return ask


def message_of(function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RoutingError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def ask_wrongly(rank: int, world_size: int, path: str) -> None:
    """Each way in which a router, or who runs the pass, can miss the routes of a micro-batch."""
    policy = policy_of(path)
    samples = with_random_routes(scored_samples(), shape_of(policy))
    replay = ReplayOptions(shape_of(policy), replay=True)
    router = routers(policy)[1]

    around_routing(router, bypass)
    check_number_of_uses(
        policy, samples, training="0 times with and 0", scoring="0 times with and 0"
    )
    del router.routing
    around_routing(router, twice)
    check_number_of_uses(
        policy, samples, training="2 times with and 0", scoring="0 times with and 2"
    )
    del router.routing
    run_pass(policy, samples, replay)  # and is right again

    hook = router.router_replay
    router.router_replay = None
    assert "a router of the model has no hook" in message_of(run_pass, policy, samples, replay)
    router.router_replay = hook

    message = message_of(forget_routes, policy, samples, replay)
    assert message == "micro-batch 1 carries no routes; pack it with routes"
    message = message_of(run_twice, policy, samples, replay)
    assert message == "micro-batch 0 went through the same layers twice in one pass"


def check_number_of_uses(
    policy: Policy, samples: list[Sample], *, training: str, scoring: str
) -> None:
    """The second router's uses of the first micro-batch's routes, in the messages of a training
    step and of a pass for log-probs.
    """
    replay = ReplayOptions(shape_of(policy), replay=True)
    record = ReplayOptions(shape_of(policy), record=True)
    one_by_one = micro_batches_of(80, micro_batch_size=1)
    of_training = message_of(run_pass, policy, samples, replay, batching=one_by_one)
    of_scoring = message_of(
        compute_log_probs,
        policy,
        TrainingBatch.of(samples),
        one_by_one,
        temperature=1.0,
        routing=record,
    )
    for message, uses in ((of_training, training), (of_scoring, scoring)):
        assert message == (
            f"the router of MoE layer 1 took its routes of micro-batch 0 {uses} times without a"
            " gradient; expected once"
        )


def forget_routes(policy: Policy, samples: list[Sample], options: ReplayOptions) -> None:
    shape = shape_of(policy)
    first, second = (
        pack(samples[i : i + 3], num_sequences=6, num_tokens=30, routes=routes)
        for i, routes in ((0, shape), (3, None))
    )
    second.micro_batch = 1
    batches = MicroBatches([first, second], 80, 0, 0)
    done = routes_of_mini_batch(options, batches.batches, policy.groups, sequence_parallel=False)
    forward_backward(policy, GRPO, batches, temperature=1.0, routing=done)


def run_twice(policy: Policy, samples: list[Sample], options: ReplayOptions) -> None:
    *_, done = run_pass(policy, samples, options)
    run_pass(policy, samples, options, routes=done)


def test_a_router_asks_once_or_the_pass_fails(model):
    run_distributed(ask_wrongly, 1, model)


def perturb(policy: Policy, model: torch.nn.Module | None = None, size: float = 3.0) -> None:
    """Move every router far off; that of the reference model likewise."""
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for i, router in enumerate(routers(policy)):
            change = size * torch.randn(router.weight.shape, generator=noise)
            router.weight += change
            if model is not None:
                gates_of(model)[i].weight += change.double()


def two_experts(rank: int, world_size: int, path: str) -> dict[str, float]:
    """With two the weights still follow the router: as in the reference with the same routes. Of 8
    experts the routes use 4."""
    policy = policy_of(path)
    model = load_reference(path)
    shape = shape_of(policy)
    samples = with_random_routes(scored_samples(), shape, among=4)
    options = ReplayOptions(shape, replay=True)
    before = compute_log_probs(
        policy, TrainingBatch.of(samples), BATCHING, temperature=1.0, routing=options
    ).log_probs
    perturb(policy, model, size=0.5)
    log_probs, _ = train_pass(policy, samples, options)
    expected = trained_log_probs(model, samples)
    differences = {
        "moved": distance(log_probs, trained_only(by_sample(before, samples), samples)),
        "error": distance(log_probs, expected),
    }
    gradients = torch.stack([router.weight.main_grad for router in routers(policy)])
    differences["used"] = float(gradients[:, :4].abs().amax(-1).min())
    differences["unused"] = float(gradients[:, 4:].abs().max())
    fill_in_unused_fields(samples)
    naive_loss(GRPO, model, samples).backward()
    actual = {str(i): gradient for i, gradient in enumerate(gradients)}
    wanted = {str(i): gate.weight.grad for i, gate in enumerate(gates_of(model))}
    differences["gradient error"] = worst_error(actual, wanted)[1]
    return differences


def trained_log_probs(model: torch.nn.Module, samples: list[Sample]) -> list[np.ndarray]:
    """Of the reference, 0 at untrained tokens."""
    return trained_only(
        [response_log_probs(model, sample)[0].detach().numpy() for sample in samples], samples
    )


def fill_in_unused_fields(samples: list[Sample]) -> None:
    """The reference needs a reference policy's log-probs; without a KL they have no effect."""
    for sample in samples:
        sample.ref_log_probs = np.zeros(sample.response_length, dtype=np.float32)


def test_with_two_experts_ratios_move_through_the_weights_alone(model):
    differences = run_distributed(two_experts, 1, model)[0]
    assert differences["moved"] > 1e-2 and differences["error"] < 1e-5, differences
    assert differences["used"] > 1e-5 and differences["unused"] == 0.0, (
        "a router's row without a token has no gradient"
    )
    assert differences["gradient error"] < 1e-4, differences


def replay_with_missing_routes(rank: int, world_size: int, path: str) -> dict[str, float]:
    """A third of the rows are unknown, one sample's all."""
    policy = policy_of(path)
    model = load_reference(path)
    shape = shape_of(policy)
    samples = with_random_routes(scored_samples(), shape, missing=0.3)
    samples[2].missing_routes[:] = True
    log_probs, done = train_pass(policy, samples, ReplayOptions(shape, replay=True, compare=True))
    expected = trained_log_probs(model, samples)
    replayed = trained_log_probs(
        model, [replace(sample, missing_routes=None) for sample in samples]
    )
    missing = sum(int(routes.missing.sum()) for routes in done)
    return {
        "error": distance(log_probs, expected),
        "ignored": distance(log_probs, replayed),
        "missing": missing - sum(int(sample.missing_routes.sum()) for sample in samples),
    }


def test_the_live_router_decides_where_a_route_is_unknown_and_nowhere_else(model):
    differences = run_distributed(replay_with_missing_routes, 1, model)[0]
    assert differences["error"] < 1e-5 and differences["ignored"] > 0.1, differences
    assert differences["missing"] == 0


def replay_again_and_again(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Three updates on the same samples, cut in another way each time."""
    policy = policy_of(path)
    samples = with_random_routes(scored_samples(), shape_of(policy))
    options = ReplayOptions(shape_of(policy), replay=True)
    kept = [sample.routed_experts.copy() for sample in samples]
    errors = []
    last = None
    for i in range(3):
        order = np.random.default_rng(i).permutation(len(samples)).tolist()
        expected = compute_log_probs(
            policy, TrainingBatch.of(samples), BATCHING, temperature=1.0, routing=options
        ).log_probs
        by_position = by_sample(expected, samples)
        shuffled = [samples[j] for j in order]
        batch = TrainingBatch.of(shuffled)
        cut = micro_batches_of(40 + 20 * i)
        result = train_mini_batch(policy, batch, GRPO, cut, temperature=1.0, routing=options)
        errors.append(
            distance(
                by_sample(result.log_probs, shuffled),
                trained_only([by_position[j] for j in order], shuffled),
            )
        )
        moved = 0.0 if last is None else distance([expected], [last])
        last = expected
    same = all(
        np.array_equal(sample.routed_experts, ids)
        for sample, ids in zip(samples, kept, strict=True)
    )
    return {"errors": errors, "moved": moved, "same": same}


def test_several_epochs_over_the_same_samples_use_the_same_routes(model):
    epochs = run_distributed(replay_again_and_again, 1, model)[0]
    assert max(epochs["errors"]) <= 2e-6 and epochs["moved"] > 1e-2 and epochs["same"], epochs


def padded_batch(rank: int, world_size: int, path: str) -> list[Tensor]:
    """A sample of 3 tokens in a micro-batch of 64, and a rank's dummy: the load of the experts,
    by layer.
    """
    policy = policy_of(path)
    shape = shape_of(policy)
    loads = []
    sample = min(
        with_random_routes(scored_samples(), shape, among=2), key=lambda sample: sample.length
    )
    batches = [
        pack(
            [sample] * i,
            num_sequences=1,
            num_tokens=1,
            total_multiple=64,
            routes=shape,
            optional=("old_log_probs",),
        )
        for i in (1, 0)
    ]
    batches[1].micro_batch = 1
    options = ReplayOptions(shape, replay=True)
    done = routes_of_mini_batch(options, batches, policy.groups, sequence_parallel=False)
    hooks = [
        router.register_forward_hook(lambda router, args, output: loads.append(output[1].sum(0)))
        for router in routers(policy)
    ]
    forward_backward(policy, GRPO, MicroBatches(batches, 64, 0, 0), temperature=1.0, routing=done)
    for hook in hooks:
        hook.remove()
    return [torch.tensor(sample.length - 1), *loads]


def test_padding_is_balanced_over_the_experts(model):
    """64 rows of 2 experts each on 8 experts are 16 each; a padded sample's own rows all choose
    experts 0 and 1.
    """
    rows, *loads = run_distributed(padded_batch, 1, model)[0]
    assert len(loads) == 4 and 1 <= rows < 8
    for load in loads[:2]:
        assert load[:2].tolist() == [int(load[0])] * 2 and rows < load[0] <= 16 + rows, load
        assert load[2:].min() >= 16 - rows and load.sum() == 128, load
    for load in loads[2:]:
        assert load.tolist() == [16] * 8


def take_once(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """How often routes were taken (without, with gradient) under full recomputation, and the
    routers' gradients with and without it."""
    gradients: dict[str, list[Tensor]] = {}
    for recompute in ("none", "full"):
        policy = policy_of(path, recompute_granularity=recompute)
        shape = shape_of(policy)
        options = ReplayOptions(shape_of(policy), replay=True)
        samples = with_random_routes(scored_samples(), shape)
        _, trained = train_pass(policy, samples, options)
        gradients[recompute] = [router.weight.main_grad.clone() for router in routers(policy)]
    scored = compute_log_probs(
        policy, TrainingBatch.of(samples), BATCHING, temperature=1.0, routing=options
    ).routing
    error = distance(gradients["full"], gradients["none"])
    return {"trained": uses_of(trained), "scored": uses_of(scored), "error": error}


def uses_of(done: list[MicroBatchRoutes]) -> list[tuple[int, int]]:
    return [
        (routes.uses[layer, False], routes.uses[layer, True])
        for routes in done
        for layer in range(2)
    ]


def test_recomputation_takes_the_same_routes_once_more(model):
    uses = run_distributed(take_once, 1, model)[0]
    assert len(uses["trained"]) >= 2 and set(uses["trained"]) == {(1, 1)}
    assert set(uses["scored"]) == {(1, 0)}
    assert uses["error"] < 1e-6
