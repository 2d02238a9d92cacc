"""Defects of routing replay: routes that reach the wrong token, layer or micro-batch, and weights that don't live."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import Defect

REPLAY, PASS = "megatron_gspo/mcore/routing_replay/router_hooks.py", "megatron_gspo/mcore/routing_replay/replay_pass.py"
RESULTS, STEP = "megatron_gspo/mcore/routing_replay/replay_results.py", "megatron_gspo/mcore/train_step.py"
AT_ROUTERS = "tests/mcore/routing_replay/test_router_hooks.py::"
FIGURES = "tests/mcore/routing_replay/test_replay_results.py::"
COUNTED = FIGURES + "test_figures_are_those_of_a_count_over_all_ranks"
WIDE = FIGURES + "test_expert_ids_of_one_and_of_two_bytes"  # under context parallelism
REFERENCE = AT_ROUTERS + "test_with_two_experts_ratios_move_through_the_weights_alone"

ROUTING = (
    Defect(
        "first rank's routes on every rank under sequence parallelism", "design", PASS,
        "self._to_device(given[mine][:, layers[0] : layers[-1] + 1])",
        "self._to_device(given[: mine.stop - mine.start][:, layers[0] : layers[-1] + 1])",
        (COUNTED,),
    ),
    Defect(
        "routes cut in order where tokens are cut in zigzag", "design", PASS,
        "        given, holes = shard.routed_experts, shard.route_holes\n",
        "        whole, at = self.batches[shard.micro_batch], self.groups.cp.rank() * shard.tokens.shape[0]\n"
        "        given, holes = whole.routed_experts, shard.route_holes\n"
        "        given = None if given is None else given[at : at + shard.tokens.shape[0]]\n",
        (WIDE,),
    ),
    Defect(
        "later pipeline stages replay the routes of the first layers", "design", PASS,
        "self._to_device(given[mine][:, layers[0] : layers[-1] + 1])",
        "self._to_device(given[mine][:, 0 : len(layers)])",
        (COUNTED,),
    ),
    Defect(
        "routes one layer late", "design", REPLAY,
        "wanted = self.given[:, layer].long()", "wanted = self.given[:, layer - 1].long()", (REFERENCE,),
    ),
    Defect(
        "routes of the first micro-batch for all", "several trainers", PASS,
        "        given, holes = shard.routed_experts, shard.route_holes\n",
        "        given, holes = self.batches[0].routed_experts[: len(shard.tokens)], shard.route_holes\n",
        (AT_ROUTERS + "test_several_epochs_over_the_same_samples_use_the_same_routes",),
    ),
    Defect(
        "expert weights without a gradient", "design", REPLAY,
        "return scores.gather(1, wanted), wanted", "return scores.detach().gather(1, wanted), wanted",
        (REFERENCE,),
    ),
    Defect(
        "weights of the live choice for the replayed experts", "design", REPLAY,
        "return scores.gather(1, wanted), wanted", "return live(scores)[0], wanted",
        (REFERENCE,),
    ),
    Defect(
        "recomputation takes the live routes", "several trainers", REPLAY,
        "        if not self.replay:\n            assert values",
        "        if not self.replay or not first:\n            values, ids = live(scores)\n            assert values",
        (AT_ROUTERS + "test_recomputation_takes_the_same_routes_once_more",),
    ),
    Defect(
        "holes replayed as if they were routes", "design", REPLAY,
        "        if self.holes is not None:\n            assert", "        if False:\n            assert",
        (AT_ROUTERS + "test_the_live_router_decides_where_a_route_is_unknown_and_nowhere_else",),
    ),
    Defect(
        "expert ids wrap around at 256", "two trainers", "megatron_gspo/routing_replay/routes.py",
        "return np.dtype(np.uint8 if num_experts <= 2**8 else np.uint16)",
        "return np.dtype(np.uint8 if num_experts <= 2**9 else np.uint16)",
        ("tests/routing_replay/test_routes.py::test_the_smallest_type_that_holds_the_ids", WIDE),
    ),
    Defect(
        "flips counted over untrained tokens too", "design", PASS,
        "weight=shard.loss_mask[mine].to(compute_device(), non_blocking=True)",
        "weight=torch.ones_like(shard.loss_mask[mine], device=compute_device())", (COUNTED,),
    ),
    Defect(
        "a token that flips on two pipeline stages counted twice", "design", RESULTS,
        "    dist.all_reduce(layers, group=done.groups.pp)\n    return (layers > 0).sum().double() if done.counts and "
        "done.groups.pp.rank() == 0 else 0.0",
        "    return (layers > 0).sum().double() if done.counts else 0.0", (COUNTED,),
    ),
    Defect(
        "padding all to the first experts", "several trainers", "megatron_gspo/routing_replay/routes.py",
        "ids = (np.asarray(positions, dtype=np.int64)[:, None] * shape.k + np.arange(shape.k)) % shape.num_experts",
        "ids = np.asarray(positions, dtype=np.int64)[:, None] * 0 + np.arange(shape.k)",
        (AT_ROUTERS + "test_padding_spreads_over_the_experts",),
    ),
    Defect(
        "a router that never asks goes unnoticed", "megatron-core's fused router", STEP,
        "        routing.check(forward_only=False)\n", "        pass\n",
        (AT_ROUTERS + "test_a_router_asks_once_or_the_pass_fails",),
    ),
    Defect(
        "a router that asks twice gets other routes", "design", REPLAY,
        "        table = self._table\n", "        table, self._table = self._table, None\n",
        (AT_ROUTERS + "test_a_router_asks_once_or_the_pass_fails",),
    ),
    Defect(
        "kept rollouts without routes replayed", "design", "megatron_gspo/loop/rollout_buffer.py",
        '    found["the engine\'s routes"] = run.config.routing.needs_rollout_routes\n', "",
        ("tests/train/test_routing.py::test_without_replay_flips_are_measured_on_a_sample",),
    ),
)  # fmt: skip
