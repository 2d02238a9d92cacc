"""Bugs between a run and its servers: replies, selection of servers, timeouts, secrets."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ENGINE, TESTS = "megatron_gspo/rollout/server_engine", "tests/rollout/server_engine"
PARSER, CLIENT = "megatron_gspo/rollout/sglang/response_parser.py", f"{ENGINE}/generation_client.py"
POOL, STREAM = f"{ENGINE}/server_pool.py", f"{ENGINE}/request_stream.py"
CHECKS, VLLM = f"{ENGINE}/response_checks.py", "megatron_gspo/rollout/vllm"
HTTP = "megatron_gspo/servers/http_client.py"
TRANSPORT = "megatron_gspo/weight_transport"
SOURCES, RELAYS = (f"tests/weight_transport/test_weight_{name}" for name in (
    "source.py", "relay.py::test_relays_get_every_tensor_to_the_bit"))  # fmt: skip
STALE = "tests/rollout/test_weight_distribution.py::test_unchanged_tensors_are_not_sent_and_a_stale_one_is_caught"
REFUSED = "tests/rollout/sglang/test_response_parser.py::test_what_is_wrong_is_refused_by_name"
TOLD = "tests/weight_transport/test_weight_update.py::test_every_transport_to_vllm_is_told_of_checksums"
VLLM_PARSER = "tests/rollout/vllm/test_response_parser.py::test_"

OF_THE_SERVERS = (
    SeededBug(
        "log-probs that are text or bools are taken for numbers", "this project", PARSER,
        "    log_prob: float\n", "    log_prob: float | bool\n", (REFUSED,),
    ),
    SeededBug(
        "returned token ids are not checked against the vocabulary", "several trainers", CHECKS,
        "if len(tokens) and tokens.max() >= vocab_size:", "if False:", (REFUSED,),
    ),
    SeededBug(
        "an answer with too few routes is stretched over the response", "one trainer", PARSER,
        "    if len(text) != _base64_length(4 * rows * num_layers * k):",
        "    rows = len(text) * 3 // (16 * num_layers * k)\n    if False:",
        (REFUSED,),
    ),
    SeededBug(
        "an answer of two versions counts as the newer one's", "several trainers", CHECKS,
        'if span.get("version") != version and', "if False and",
        ("tests/rollout/sglang/test_response_parser.py::test_the_version_is_one_and_named",),
    ),
    SeededBug(
        "the routes of the last token of a part are never requested", "design", f"{ENGINE}/partial_response.py",
        "return self.prompt.length + self.num_tokens - 1 if self.parts else 0",
        "return self.prompt.length + self.num_tokens if self.parts else 0",
        (f"{TESTS}/test_partial_response.py::test_parts_are_joined",),
    ),
    SeededBug(
        "samples of a server with old weights are trained on", "several trainers", CLIENT,
        "            if found != version:", "            if False:",
        (f"{TESTS}/test_generation_client.py::test_old_weights_never_serve",),
    ),
    SeededBug(
        "a request with an empty reply is repeated without end", "this project", CLIENT,
        "if self._interruptions > interruptions:", "if True:",
        (f"{TESTS}/test_generation_client.py::test_a_passing_fault_is_survived_and_counted_once",),
    ),
    SeededBug(
        "a server's past counts for ever", "this project", POOL,
        "server.failed_requests = server.times_down = 0", "server.failed_requests = 0",
        (f"{TESTS}/test_generation_client.py::test_a_server_that_gives_a_good_answer_is_not_held_to_its_past",),
    ),
    SeededBug(
        "the time without servers restarts with every take", "this project", STREAM,
        "        pool, end = self._client.pool, None",
        "        self._no_server_since = None\n        pool, end = self._client.pool, None",
        (f"{TESTS}/test_request_stream.py::test_the_recovery_time_goes_on_from_one_take_to_the_next",),
    ),
    SeededBug(
        "a group at the bound of staleness is passed over", "several trainers", STREAM,
        "max(group.oldest_version - oldest, 0)", "max(group.oldest_version - oldest + 1, 0)",
        (f"{TESTS}/test_request_stream.py::test_a_group_that_is_due_is_waited_for_and_comes_first",),
    ),
    SeededBug(
        "an id outside the vocabulary is sent, which ends the server", "SGLang 0.5.23", STREAM,
        "if (largest := int(prompt.token_ids.max())) >= model.vocab_size:",
        "if (largest := int(prompt.token_ids.max())) > model.vocab_size:",
        (f"{TESTS}/test_request_stream.py::test_a_token_outside_the_vocabulary_never_leaves",),
    ),
    SeededBug(
        "a paused server is checked by generating a token", "this project", POOL,
        "if server.alive and busy and now", "if server.alive and now",
        (f"{TESTS}/test_server_pool.py::test_only_a_busy_server_is_asked_for_a_token",),
    ),
    SeededBug(
        "a hung server is not restarted where a request found it first", "this project", POOL,
        "        if too_many and no_response:", "        if too_many and no_response and server.alive:",
        (f"{TESTS}/test_server_pool.py::test_a_server_that_was_lost_for_its_requests_hangs_too_when_it_is_silent",),
    ),
    SeededBug(
        "a returning server serves with old weights", "several trainers", POOL,
        "server.version = version if version == self.version else None", "server.version = self.version",
        (f"{TESTS}/test_server_pool.py::test_what_comes_back_serves_only_with_the_current_weights",),
    ),
    SeededBug(
        "what is sampled depends on the client", "design", "megatron_gspo/rollout/server_source.py",
        "[prompts[i] for i in share], sampling, seed=seed)",
        "[prompts[i] for i in share], sampling, seed=seed + dist.get_rank())",
        ("tests/rollout/test_server_source.py::test_the_samples_do_not_depend_on_the_clients",),
    ),
    SeededBug(
        "a client does not report a server with other weights", "design", f"{ENGINE}/rollout_client.py",
        "[s.found_stale for s in servers]", "[False for s in servers]",
        (f"{TESTS}/test_rollout_client.py::test_a_server_with_other_weights_is_reported_and_updated",),
    ),
    SeededBug(
        "the owner's reply undoes what a client found after its report", "this project", f"{ENGINE}/server_pool.py",
        "version if state.has_weights and not server.found_stale else None", "version if state.has_weights else None",
        (f"{TESTS}/test_rollout_client.py::"
         "test_other_weights_that_are_found_between_report_and_reply_are_reported_next",),
    ),
    SeededBug(
        "compressed answers are unpacked before their size is known", "this project", HTTP,
        'if response.headers.get("Content-Encoding", "identity") != "identity":', "if False:",
        ("tests/servers/test_http_client.py::test_nothing_compressed_is_asked_for_or_unpacked",),
    ),
    SeededBug(
        "a server's words repeat the API key", "this project", HTTP,
        'return words.replace(self._key.encode(), b"***") if self._key else words', "return words",
        ("tests/servers/test_http_client.py::test_a_status_but_200",),
    ),
    SeededBug(
        "only the first expert-parallel rank sends its weights", "design", "megatron_gspo/mcore/weight_sources.py",
        "range(1 if family.stacks_experts else groups.ep.size())", "range(1)",
        ("tests/mcore/test_weight_sources.py::test_the_sources_send_every_tensor_once_and_receive_no_other",),
    ),
    SeededBug(
        "the experts of one rank are not handed over to a server", "design", f"{TRANSPORT}/weight_source.py",
        "for number in range(expert):", "for number in range(max(expert - 1, 1)):",
        ("tests/weight_transport/test_weight_source.py::test_every_server_gets_every_tensor_once_from_its_own_node",),
    ),
    SeededBug(
        "a relay serves the first server of its node alone", "design", f"{TRANSPORT}/weight_source.py",
        "if place.url not in servers:", "if not servers or holders and place.url not in servers:",
        (f"{SOURCES}::test_a_node_without_a_part_of_the_model_gets_it_once_from_another_by_a_relay",),
    ),
    SeededBug(
        "a relay hands over the tensors of the first broadcast alone", "design", f"{TRANSPORT}/weight_relay.py",
        "while (bucket := _receive(rank, group, device)) is not None:",
        "for bucket in list(iter(lambda: _receive(rank, group, device), None))[:1]:", (RELAYS,),
    ),
    SeededBug(
        "a relay also reads the weights as their source does", "design", "megatron_gspo/rollout/weight_distribution.py",
        "return iter(stream) if source is None or group is None else", "return iter(stream) if True else",
        ("tests/rollout/test_weight_distribution.py::test_a_node_that_lacks_tensors_gets_them_by_a_relay",),
    ),
    SeededBug(
        "a stale tensor passes the checksums of an update", "design", f"{TRANSPORT}/receiver/megatron_gspo_receiver.py",
        "if _held.get(name) != value), \"\")", "if value is None), \"\")", (STALE,),
    ),
    SeededBug(
        "tensors that were sent once are not sent again", "design", f"{TRANSPORT}/receiver_transport.py",
        "self._sums[name] != self._known.get(name):", "name not in self._known:", (STALE,),
    ),
    SeededBug(
        "tokens of vLLM without a weight version are taken for those of the first", "design",
        f"{VLLM}/response_parser.py", "    if starts != ends:", "    if False:",
        (f"{VLLM_PARSER}a_wrong_answer_is_refused_by_name",),
    ),
    SeededBug(
        "vLLM's stand-in for a log-prob of NaN is trained on", "design", f"{VLLM}/response_parser.py",
        "    if _FLOOR in values:", "    if False:", (f"{VLLM_PARSER}a_wrong_answer_is_refused_by_name",),
    ),
    SeededBug(
        "vLLM's log-probs of other tokens", "several trainers", f"{VLLM}/response_parser.py",
        "    if [row.token_id for row in rows] != choice.token_ids:", "    if False:",
        (f"{VLLM_PARSER}a_wrong_answer_is_refused_by_name",),
    ),
    SeededBug(
        "routes of the response before those of the prompt", "design", f"{VLLM}/response_parser.py",
        "(response.prompt_routed_experts, response.choices[0].routed_experts)",
        "(response.choices[0].routed_experts, response.prompt_routed_experts)",
        (f"{VLLM_PARSER}rows_that_come_apart_a_last_row_that_lacks_and_unknown_rows",),
    ),
    SeededBug(
        "a parameter that an update leaves out counts as written", "design", f"{VLLM}/vllm_weight_endpoints.py",
        "if found.get(name) == digest)", "if name not in found)",
        ("tests/rollout/vllm/test_vllm_weight_endpoints.py::test_the_proof_of_an_update_names_what_was_not_written",),
    ),
    SeededBug(
        "the weights are not read to their end where the servers' group broke", "this project",
        f"{TRANSPORT}/receiver_transport.py",
        "return self._changed(tensors) if self._changes_only or self.checksums else tensors",
        "yield from self._changed(tensors) if self._changes_only or self.checksums else tensors",
        ("tests/weight_transport/test_receiver_transport.py::test_the_stream_of_a_broken_transfer_is_read_to_its_end",),
    ),
    SeededBug(
        "a server that refuses the key is waited for", "this project", f"{ENGINE}/server_engine.py",
        "                if not error.retry:\n                    raise\n", "",
        (f"{TESTS}/test_server_engine.py::test_what_waiting_does_not_mend_ends_at_once",),
    ),
    SeededBug(
        "checkpoints for servers are never proven", "this project", f"{TRANSPORT}/disk_transport.py",
        "super().__init__(endpoints, checksums=checksums)", "super().__init__(endpoints)", (TOLD,),
    ),
    SeededBug(
        "updates through vLLM's own engines are never proven", "this project", f"{TRANSPORT}/weight_update.py",
        "return own(endpoints, checksums=checksums)", "return own(endpoints)", (TOLD,),
    ),
    SeededBug(
        "a draw that vLLM drops advances the request's generator", "vLLM 0.32 on a CPU",
        f"{VLLM}/worker_extension/megatron_gspo_worker.py",
        "            generator.set_state(state)\n", "            del generator, state\n",
        ("tests/rollout/vllm/worker_extension/test_megatron_gspo_worker.py::test_a_dropped_draw_is_drawn_again",),
    ),
)  # fmt: skip
