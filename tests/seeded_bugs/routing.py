"""Bugs of routing replay: routes of the wrong token, layer or micro-batch, and weights without
a gradient.
"""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ROUTING = (
    SeededBug(
        name="first rank's routes on every rank under sequence parallelism",
        file="megatron_gspo/mcore/routing_replay/micro_batch_routes.py",
        before="given[self.rows]",
        after="given[:self.rows.stop - self.rows.start]",
        test=(
            "tests/mcore/routing_replay/test_gather_results.py"
            "::test_stats_are_those_of_a_count_over_all_ranks[tp2 ep2]"
        ),
    ),
    SeededBug(
        name="selections compared in the order of their scores",
        file="megatron_gspo/mcore/routing_replay/selections.py",
        before="chosen.sort(dim=-1).values",
        after="chosen",
        test="tests/mcore/routing_replay/test_selections.py::test_the_share_is_that_of_sets",
    ),
    SeededBug(
        name="an engine's selections counted from the padding",
        file="megatron_gspo/rollout/embedded/selection_recorder.py",
        before="row - np.int32(padding)",
        after="row",
        test=(
            "tests/rollout/embedded/test_families.py"
            "::test_the_last_selections_are_those_of_a_plain_pass[glm_dsa]"
        ),
    ),
    SeededBug(
        name="selections of a response's end from what was decoded after it",
        file="megatron_gspo/rollout/embedded/decode.py",
        before="selections.add(live, ~finished)",
        after="selections.add(live, finished | True)",
        test=(
            "tests/rollout/embedded/test_families.py"
            "::test_the_last_selections_are_those_of_a_plain_pass[glm_dsa]"
        ),
    ),
    SeededBug(
        name="routes cut in order where tokens are cut in zigzag",
        file="megatron_gspo/data/packing.py",
        before="name: value[indices] for",
        after=(
            "name: value.chunk(cp_size)[cp_rank] if name == 'routed_experts' else"
            " value[indices] for"
        ),
        test="tests/mcore/routing_replay/test_gather_results.py::test_expert_ids_of_one_and_of_two_bytes[256-uint8]",
    ),
    SeededBug(
        name="a pipeline stage gets the routes of another stage's layers",
        file="megatron_gspo/rollout/sample_exchange.py",
        before="_of_layers(sample, stages[stage])",
        after="_of_layers(sample, stages[-1 - stage])",
        test="tests/rollout/test_sample_exchange.py::test_every_sample_is_on_each_rank_of_its_replica_and_nowhere_else",
    ),
    SeededBug(
        name="routes one layer late",
        file="megatron_gspo/mcore/routing_replay/micro_batch_routes.py",
        before="replayed = self.given[layer].long()",
        after="replayed = self.given[(layer or len(self.given)) - 1].long()",
        test="tests/mcore/routing_replay/test_router_hooks.py::test_with_two_experts_ratios_move_through_the_weights_alone",
    ),
    SeededBug(
        name="routes of the first micro-batch for all",
        file="megatron_gspo/mcore/micro_batch_inputs.py",
        before="routes.begin_chunk(shard,",
        after=(
            "first = self.__dict__.setdefault('first', shard.routed_experts);"
            " routes.begin_chunk(shard if first is None else replace(shard,"
            " routed_experts=first[:len(shard.tokens)]),"
        ),
        test="tests/mcore/routing_replay/test_router_hooks.py::test_several_epochs_over_the_same_samples_use_the_same_routes",
    ),
    SeededBug(
        name="expert weights without a gradient",
        file="megatron_gspo/mcore/routing_replay/micro_batch_routes.py",
        before="return (weights.gather(1, replayed), replayed)",
        after="return (weights.detach().gather(1, replayed), replayed)",
        test="tests/mcore/routing_replay/test_router_hooks.py::test_with_two_experts_ratios_move_through_the_weights_alone",
    ),
    SeededBug(
        name="recomputation takes the live routes",
        file="megatron_gspo/mcore/routing_replay/micro_batch_routes.py",
        before="replayed = self.given[layer].long()",
        after="replayed = self.given[layer].long() if first else top_k(scores)[1]",
        test="tests/mcore/routing_replay/test_router_hooks.py::test_recomputation_takes_the_same_routes_once_more",
    ),
    SeededBug(
        name="missing routes replayed as if they were known",
        file="megatron_gspo/mcore/routing_replay/micro_batch_routes.py",
        before="if self.missing is not None:",
        after="if False:",
        test="tests/mcore/routing_replay/test_router_hooks.py::test_the_live_router_decides_where_a_route_is_unknown_and_nowhere_else",
    ),
    SeededBug(
        name="expert ids wrap around at 256",
        file="megatron_gspo/routing_replay/routes.py",
        before="np.uint8 if num_experts <= 2 ** 8",
        after="np.uint8 if num_experts <= 2 ** 9",
        test="tests/routing_replay/test_routes.py::test_the_smallest_type_that_holds_the_ids",
    ),
    SeededBug(
        name="padding is routed live while routes are recorded, and balanced when they are replayed",
        file="megatron_gspo/loop/routing.py",
        before="balanced_padding=config.replay == 'r2'",
        after="balanced_padding=False",
        test="tests/loop/test_first_update.py::test_ratios_are_exactly_1_where_no_weight_has_changed[r2]",
    ),
    SeededBug(
        name="a router that bypasses the hook goes unnoticed",
        file="megatron_gspo/mcore/train_step.py",
        before="micro_batch.check_uses(forward_only=False)",
        after="pass",
        test="tests/mcore/routing_replay/test_router_hooks.py::test_a_router_asks_once_or_the_pass_fails",
    ),
    SeededBug(
        name="a sample has the routes of the sample before it",
        file="megatron_gspo/rollout/sample_codec.py",
        before="routed_experts=routes[i][0]",
        after="routed_experts=routes[i - 1][0]",
        test="tests/rollout/test_sample_codec.py::test_samples_survive_the_wire",
    ),
)
