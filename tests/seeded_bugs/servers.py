"""Defects between a run and its servers: answers, who serves, how long is waited, what leaves the client."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import Defect

SGLANG, TESTS = "megatron_gspo/rollout/sglang", "tests/rollout/sglang"
ANSWERS, CLIENT, FLEET = f"{SGLANG}/response_parser.py", f"{SGLANG}/client.py", f"{SGLANG}/server_pool.py"
HTTP, STREAM = "megatron_gspo/servers/http_client.py", f"{SGLANG}/request_stream.py"
REFUSED = f"{TESTS}/test_response_parser.py::test_what_is_wrong_is_refused_by_name"

OF_THE_SERVERS = (
    Defect(
        "log-probs that are text or bools are taken for numbers", "this project", ANSWERS,
        " and type(row[0]) in (float, int) for row", " for row", (REFUSED,),
    ),
    Defect(
        "token ids that come back are not held against the vocabulary", "several trainers", ANSWERS,
        "if len(ids) and (ids.min() < 0 or ids.max() >= asked.vocab_size):", "if False:", (REFUSED,),
    ),
    Defect(
        "an answer with too few routes is stretched over the response", "one trainer", ANSWERS,
        "if ids.size != rows * shape.model_layers * shape.k:",
        "rows = ids.size // (shape.model_layers * shape.k)\n    if ids.size != rows * shape.model_layers * shape.k:",
        (REFUSED,),
    ),
    Defect(
        "an answer of two versions counts as the newer one's", "several trainers", ANSWERS,
        'if span.get("version") != version and', "if False and",
        (f"{TESTS}/test_response_parser.py::test_the_version_is_one_and_named",),
    ),
    Defect(
        "the routes of the last token of a part are asked for never", "design", f"{SGLANG}/partial_response.py",
        "return self.prompt.length + self.drawn - 1 if self.parts else 0",
        "return self.prompt.length + self.drawn if self.parts else 0",
        (f"{TESTS}/test_partial_response.py::test_parts_are_joined",),
    ),
    Defect(
        "samples of a server with old weights are trained on", "several trainers", CLIENT,
        "            if found != version:", "            if False:",
        (f"{TESTS}/test_client.py::test_old_weights_never_serve",),
    ),
    Defect(
        "a request that comes back empty is repeated for ever", "this project", CLIENT,
        "if self._interruptions > interruptions:", "if True:",
        (f"{TESTS}/test_client.py::test_a_passing_fault_is_survived_and_counted_once",),
    ),
    Defect(
        "a server's past counts for ever", "this project", CLIENT,
        "member.faults = member.losses = 0", "member.faults = 0",
        (f"{TESTS}/test_client.py::test_a_server_that_gives_a_good_answer_is_not_held_to_its_past",),
    ),
    Defect(
        "the time without servers begins anew with every take", "this project", STREAM,
        "        fleet, end = self._client.fleet, None",
        "        self._unserved = None\n        fleet, end = self._client.fleet, None",
        (f"{TESTS}/test_request_stream.py::test_the_recovery_time_goes_on_from_one_take_to_the_next",),
    ),
    Defect(
        "a group at the bound of staleness is passed over", "several trainers", STREAM,
        "max(group.oldest - oldest, 0)", "max(group.oldest - oldest + 1, 0)",
        (f"{TESTS}/test_request_stream.py::test_a_group_that_is_due_is_waited_for_and_comes_first",),
    ),
    Defect(
        "an id outside the vocabulary is sent, which ends the server", "SGLang 0.5.23", STREAM,
        "if (largest := int(prompt.token_ids.max())) >= model.vocab_size:",
        "if (largest := int(prompt.token_ids.max())) > model.vocab_size:",
        (f"{TESTS}/test_request_stream.py::test_a_token_outside_the_vocabulary_never_leaves",),
    ),
    Defect(
        "a server that is paused is asked for a token to prove its health", "this project", FLEET,
        "if member.alive and member.tasks and time.", "if member.alive and time.",
        (f"{TESTS}/test_server_pool.py::test_only_a_busy_server_is_asked_for_a_token",),
    ),
    Defect(
        "a server that hangs is not started again where a request noticed first", "this project", FLEET,
        "        if often and hangs:", "        if often and hangs and member.alive:",
        (f"{TESTS}/test_server_pool.py::test_a_server_that_was_lost_for_its_requests_hangs_too_when_it_is_silent",),
    ),
    Defect(
        "a server that comes back serves with whatever weights it has", "several trainers", FLEET,
        "member.version = version if version == self.version else None", "member.version = self.version",
        (f"{TESTS}/test_server_pool.py::test_what_comes_back_serves_only_with_the_current_weights",),
    ),
    Defect(
        "compressed answers are unpacked before their size is known", "this project", HTTP,
        'if response.headers.get("Content-Encoding", "identity") != "identity":', "if False:",
        ("tests/servers/test_http_client.py::test_nothing_compressed_is_asked_for_or_unpacked",),
    ),
    Defect(
        "a server's words repeat the API key", "this project", HTTP,
        'return words.replace(self._key.encode(), b"***") if self._key else words', "return words",
        ("tests/servers/test_http_client.py::test_a_status_but_200",),
    ),
)  # fmt: skip
