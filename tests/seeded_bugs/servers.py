"""Bugs of what servers return, of weight versions and of weight sync."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

SERVERS = (
    SeededBug(
        name="an answer with too few routes is stretched over the response",
        file="megatron_gspo/rollout/sglang/response_parser.py",
        before="if len(text) != _base64_length(4 * rows * num_layers * k):",
        after="if (rows := (len(text) * 3 // (16 * num_layers * k))) < 0:",
        test="tests/rollout/sglang/test_response_parser.py::test_what_is_wrong_is_refused_by_name",
    ),
    SeededBug(
        name="an answer of two versions counts as the newer one's",
        file="megatron_gspo/rollout/server_engine/response_checks.py",
        before="if span.get('version') != version and",
        after="if False and",
        test="tests/rollout/sglang/test_response_parser.py::test_the_version_is_one_and_named",
    ),
    SeededBug(
        name="the routes of the last token of a part are never requested",
        file="megatron_gspo/rollout/server_engine/partial_response.py",
        before="self.prompt.length + self.num_tokens - 1 if self.parts",
        after="self.prompt.length + self.num_tokens if self.parts",
        test="tests/rollout/server_engine/test_partial_response.py::test_parts_are_joined",
    ),
    SeededBug(
        name="samples of a server with old weights are trained on",
        file="megatron_gspo/rollout/server_engine/response_generator.py",
        before="if reported != version:",
        after="if False:",
        test="tests/rollout/server_engine/test_generation.py::test_old_weights_never_serve",
    ),
    SeededBug(
        name="a group at the bound of staleness is passed over",
        file="megatron_gspo/rollout/server_engine/request_stream.py",
        before="max(group.oldest_version - oldest, 0)",
        after="max(group.oldest_version - oldest + 1, 0)",
        test="tests/rollout/server_engine/test_request_stream.py::test_a_group_that_is_due_is_waited_for_and_comes_first",
    ),
    SeededBug(
        name="a returning server serves with old weights",
        file="megatron_gspo/rollout/server_engine/server_pool.py",
        before="server.version = version if version == self.version else None",
        after="server.version = self.version",
        test="tests/rollout/server_engine/test_server_pool.py::test_what_comes_back_serves_only_with_the_current_weights",
    ),
    SeededBug(
        name="only the first expert-parallel rank sends its weights",
        file="megatron_gspo/mcore/weight_sources.py",
        before="range(1 if family.stacks_experts else groups.ep.size())",
        after="range(1)",
        test="tests/mcore/test_weight_sources.py::test_the_sources_send_every_tensor_once_and_receive_no_other",
    ),
    SeededBug(
        name="the experts of one rank are not handed over to a server",
        file="megatron_gspo/weight_transport/weight_source.py",
        before="for number in range(expert)",
        after="for number in range(max(expert - 1, 1))",
        test="tests/weight_transport/test_weight_source.py::test_every_server_gets_every_tensor_once_from_its_own_node",
    ),
    SeededBug(
        name="a stale tensor passes the checksums of an update",
        file="megatron_gspo/weight_transport/receiver/megatron_gspo_receiver.py",
        before="if _held.get(name) != value",
        after="if value is None",
        test="tests/rollout/test_weight_sync.py::test_unchanged_tensors_are_not_sent_and_a_stale_one_is_caught",
    ),
    SeededBug(
        name="vLLM's stand-in for a log-prob of NaN is trained on",
        file="megatron_gspo/rollout/vllm/response_parser.py",
        before="if _FLOOR in values:",
        after="if False:",
        test="tests/rollout/vllm/test_response_parser.py::test_a_wrong_answer_is_refused_by_name",
    ),
    SeededBug(
        name="routes of the response before those of the prompt",
        file="megatron_gspo/rollout/vllm/response_parser.py",
        before="(response.prompt_routed_experts, response.choices[0].routed_experts)",
        after="(response.choices[0].routed_experts, response.prompt_routed_experts)",
        test="tests/rollout/vllm/test_response_parser.py::test_rows_that_come_apart_a_last_row_that_lacks_and_unknown_rows",
    ),
    SeededBug(
        name="a parameter that an update leaves out counts as written",
        file="megatron_gspo/rollout/vllm/vllm_api.py",
        before="if digests.get(name) == digest",
        after="if name not in digests",
        test="tests/rollout/vllm/test_vllm_api.py::test_the_proof_of_an_update_names_what_was_not_written",
    ),
    SeededBug(
        name="checkpoints for servers are never proven",
        file="megatron_gspo/weight_transport/disk_transport.py",
        before="super().__init__(endpoints, checksums=checksums)",
        after="super().__init__(endpoints)",
        test="tests/weight_transport/test_weight_update.py::test_every_transport_to_vllm_is_told_of_checksums",
    ),
    SeededBug(
        name="a server that was down for hours is asked without a wait",
        file="megatron_gspo/servers/backoff.py",
        before="doubled = math.inf",
        after="doubled = 0.0",
        test="tests/servers/test_backoff.py::test_waits_double_up_to_the_longest",
    ),
)
