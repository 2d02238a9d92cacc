"""Bugs of routing replay: routes of the wrong token, layer or micro-batch, and weights without a gradient."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ROUTES = "megatron_gspo/mcore/routing_replay/micro_batch_routes.py"
HOOKS = "megatron_gspo/mcore/routing_replay/router_hooks.py"
INPUTS = "megatron_gspo/mcore/micro_batch_inputs.py"
RESULTS, STEP = "megatron_gspo/mcore/routing_replay/gather_results.py", "megatron_gspo/mcore/train_step.py"
AT_ROUTERS = "tests/mcore/routing_replay/test_router_hooks.py::"
FIGURES = "tests/mcore/routing_replay/test_gather_results.py::"
COUNTED = FIGURES + "test_stats_are_those_of_a_count_over_all_ranks"
WIDE = FIGURES + "test_expert_ids_of_one_and_of_two_bytes"  # under context parallelism
REFERENCE = AT_ROUTERS + "test_with_two_experts_ratios_move_through_the_weights_alone"

ROUTING = (
    SeededBug(
        "first rank's routes on every rank under sequence parallelism", "design", ROUTES,
        'wanted["given"] = given[self.rows][:, first : first + len(layers)]',
        'wanted["given"] = given[: self.rows.stop - self.rows.start][:, first : first + len(layers)]',
        (COUNTED,),
    ),
    SeededBug(
        "routes cut in order where tokens are cut in zigzag", "design", INPUTS,
        "        shard = context_parallel_shard(batch, groups.cp.rank(), groups.cp.size())\n",
        "        shard = context_parallel_shard(batch, groups.cp.rank(), groups.cp.size())\n"
        "        if batch.routed_experts is not None:\n"
        "            parts = batch.routed_experts.chunk(groups.cp.size())\n"
        "            shard = replace(shard, routed_experts=parts[groups.cp.rank()])\n",
        (WIDE,),
    ),
    SeededBug(
        "later pipeline stages replay the routes of the first layers", "design", ROUTES,
        'wanted["given"] = given[self.rows][:, first : first + len(layers)]',
        'wanted["given"] = given[self.rows][:, : len(layers)]',
        (COUNTED,),
    ),
    SeededBug(
        "a pipeline stage gets the routes of another stage's layers", "design",
        "megatron_gspo/rollout/sample_exchange.py",
        "read = _of_layers(sample, stages[stage])", "read = _of_layers(sample, stages[-1 - stage])",
        ("tests/rollout/test_sample_exchange.py::test_every_sample_is_on_each_rank_of_its_replica_and_nowhere_else",),
    ),
    SeededBug(
        "recorded routes of a stage in the order of another", "design", RESULTS,
        "    layers = sorted(micro_batches[0].layers)\n", "    layers = sorted(micro_batches[0].layers)[::-1]\n",
        (COUNTED,),
    ),
    SeededBug(
        "routes one layer late", "design", ROUTES,
        "replayed = self.given[layer].long()", "replayed = self.given[(layer or len(self.given)) - 1].long()",
        (REFERENCE,),
    ),
    SeededBug(
        "routes of the first micro-batch for all", "several trainers", INPUTS,
        "routes = self._routing[shard.micro_batch] if self._routing is not None else None\n",
        "routes = self._routing[shard.micro_batch] if self._routing is not None else None\n"
        "        if shard.routed_experts is not None:\n"
        "            self._first = getattr(self, '_first', shard.routed_experts)\n"
        "            shard = replace(shard, routed_experts=self._first[: len(shard.tokens)])\n",
        (AT_ROUTERS + "test_several_epochs_over_the_same_samples_use_the_same_routes",),
    ),
    SeededBug(
        "expert weights without a gradient", "design", ROUTES,
        "return weights.gather(1, replayed), replayed", "return weights.detach().gather(1, replayed), replayed",
        (REFERENCE,),
    ),
    SeededBug(
        "weights of the live choice for the replayed experts", "design", ROUTES,
        "return weights.gather(1, replayed), replayed", "return top_k(scores)[0], replayed",
        (REFERENCE,),
    ),
    SeededBug(
        "recomputation takes the live routes", "several trainers", ROUTES,
        "        if not options.replay:\n            assert values",
        "        if not options.replay or not first:\n            values, ids = top_k(scores)\n"
        "            assert values",
        (AT_ROUTERS + "test_recomputation_takes_the_same_routes_once_more",),
    ),
    SeededBug(
        "noise of the routers by row in place of position", "design", "megatron_gspo/routing_replay/router_noise.py",
        "_mix(starts[segments] ^ positions)", "_mix(starts[segments] ^ torch.arange(len(positions)))",
        ("tests/routing_replay/test_router_noise.py::test_a_token_has_the_same_noise_in_any_packing",),
    ),
    SeededBug(
        "experts weighed by the perturbed logits unasked", "design", ROUTES,
        "return choose, choose if noise.perturb_weights else scores", "return choose, choose",
        ("tests/mcore/routing_replay/test_micro_batch_routes.py::test_noise_changes_the_choice_and_not_the_weights",),
    ),
    SeededBug(
        "missing routes replayed as if they were known", "design", ROUTES,
        "        if self.missing is not None:\n            assert", "        if False:\n            assert",
        (AT_ROUTERS + "test_the_live_router_decides_where_a_route_is_unknown_and_nowhere_else",),
    ),
    SeededBug(
        "expert ids wrap around at 256", "two trainers", "megatron_gspo/routing_replay/routes.py",
        "return np.dtype(np.uint8 if num_experts <= 2**8 else np.uint16)",
        "return np.dtype(np.uint8 if num_experts <= 2**9 else np.uint16)",
        ("tests/routing_replay/test_routes.py::test_the_smallest_type_that_holds_the_ids", WIDE),
    ),
    SeededBug(
        "flips counted over untrained tokens too", "design", ROUTES,
        'wanted["weight"] = shard.loss_mask[self.rows]',
        'wanted["weight"] = torch.ones_like(shard.loss_mask[self.rows])', (COUNTED,),
    ),
    SeededBug(
        "a token that flips on two pipeline stages counted twice", "design", RESULTS,
        "    dist.all_reduce(flipped, group=pipeline)\n"
        "    return (flipped > 0).sum().double() if micro_batches[0].is_counted and pipeline.rank() == 0 else 0.0",
        "    return (flipped > 0).sum().double() if micro_batches[0].is_counted else 0.0", (COUNTED,),
    ),
    SeededBug(
        "padding all to the first experts", "several trainers", "megatron_gspo/routing_replay/routes.py",
        "ids = (np.asarray(positions, dtype=np.int64)[:, None] * shape.k + np.arange(shape.k)) % shape.num_experts",
        "ids = np.asarray(positions, dtype=np.int64)[:, None] * 0 + np.arange(shape.k)",
        (AT_ROUTERS + "test_padding_is_balanced_over_the_experts",),
    ),
    SeededBug(
        "a router that bypasses the hook goes unnoticed", "megatron-core's fused router", STEP,
        "        micro_batch.check_uses(forward_only=False)\n", "        pass\n",
        (AT_ROUTERS + "test_a_router_asks_once_or_the_pass_fails",),
    ),
    SeededBug(
        "a router that is called twice gets other routes", "design", HOOKS,
        "        routes = self._routes\n", "        routes, self._routes = self._routes, None\n",
        (AT_ROUTERS + "test_a_router_asks_once_or_the_pass_fails",),
    ),
    SeededBug(
        "kept rollouts without routes replayed", "design", "megatron_gspo/loop/rollout_cache.py",
        '        found["the engine\'s routes"] = self.config.routing.needs_rollout_routes\n', "",
        ("tests/train/test_routing.py::test_without_replay_flips_are_measured_on_a_sample",),
    ),
    SeededBug(
        "the row after a context-parallel chunk taken for the next token's", "design", RESULTS,
        "after = (rows.diff() == 1) & (targets.diff() == 1)", "after = rows.diff() == 1", (COUNTED,),
    ),
    SeededBug(
        "shifted routes taken for the chance level", "design", "megatron_gspo/routing_replay/route_agreement.py",
        "float(means.max()), float(means.min())", "float(means[0]), float(means[1:].mean())",
        ("tests/routing_replay/test_route_agreement.py::test_shifted_routes_show_the_levels_of_a_healthy_pass",),
    ),
)  # fmt: skip
