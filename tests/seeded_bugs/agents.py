"""Bugs of agents' runs: what is trained of them, and whose calls they are."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

AGENTS = (
    SeededBug(
        name="a reply that two branches share is trained twice",
        file="megatron_gspo/agents/session_tree.py",
        before="if node not in already_trained:",
        after="if True:",
        test="tests/agents/test_run_samples.py::test_two_branches_by_hand",
    ),
    SeededBug(
        name="a branch counts as a sequence of its own",
        file="megatron_gspo/data/packing.py",
        before="np.repeat(np.arange(len(positions)), table['rows'])",
        after="np.arange(len(rows))",
        test="tests/data/test_packing.py::test_the_rows_of_a_sample_are_packed_as_samples_of_their_own_but_of_one_segment",
    ),
    SeededBug(
        name="the routes of a later row are those of the first",
        file="megatron_gspo/data/packing.py",
        before="in_sample = slice(row.offset, row.offset + row.length - 1)",
        after="in_sample = slice(0, row.length - 1)",
        test="tests/data/test_packing.py::test_the_rows_of_a_sample_are_packed_as_samples_of_their_own_but_of_one_segment",
    ),
    SeededBug(
        name="a reply whose client has gone is trained",
        file="megatron_gspo/agents/endpoint.py",
        before="for data in self._dialect.events(self._call, reply):",
        after="self._deliver(reply)\n                for data in self._dialect.events(self._call, reply):",
        test="tests/agents/test_endpoint.py::test_stream_consumer_disconnects_half_way",
    ),
    SeededBug(
        name="the key of another run is taken",
        file="megatron_gspo/agents/endpoint.py",
        before="hmac.compare_digest(known.encode(), key.encode())",
        after="hmac.compare_digest(known.encode(), known.encode())",
        test="tests/agents/test_endpoint.py::test_key_of_an_ended_run_of_another_none",
    ),
    SeededBug(
        name="a runner that has lost its run goes on with it",
        file="megatron_gspo/agents/players.py",
        before="endpoint.end_run(run)",
        after="pass",
        test="tests/agents/test_runners.py::test_a_dead_runner_loses_its_run",
    ),
    SeededBug(
        name="what a run has earned is of every reply",
        file="megatron_gspo/agents/run_samples.py",
        before="turns[-1] = replace(turns[-1], reward=turns[-1].reward + rest)",
        after="turns = [replace(turn, reward=turn.reward + rest) for turn in turns]",
        test="tests/agents/test_run_samples.py::test_two_branches_by_hand",
    ),
    SeededBug(
        name="the time limit of a run does not wait for the trainer",
        file="megatron_gspo/rollout/server_engine/response_generator.py",
        before="if state.paused:",
        after="if False:",
        test="tests/rollout/server_engine/test_following_client.py::test_it_follows_and_reports",
    ),
    SeededBug(
        name="the process of agents does not end its requests before an update",
        file="megatron_gspo/agents/hosted_agents.py",
        before="await client.interrupt_requests()",
        after="await client.pause_requests()",
        test="tests/agents/test_agents_on_servers.py::test_an_update_interrupts_calls_there",
    ),
    SeededBug(
        name="the failure of an engine is another error for the runs of agents",
        file="megatron_gspo/agents/agent_process.py",
        before="playing.end(failure=playing.generator_failure or _error_of(message))",
        after="playing.end(failure=_error_of(message))",
        test="tests/agents/test_agent_process.py::test_errors_are_those_of_the_generator",
    ),
)
