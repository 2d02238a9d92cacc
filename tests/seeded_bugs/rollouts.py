"""Bugs of episodes, and of samples that move between ranks."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

ROLLOUTS = (
    SeededBug(
        name="a log-prob just above -256 is sent as 0",
        file="megatron_gspo/rollout/top_codec.py",
        before="codes.max(initial=0) < _ZERO",
        after="codes.max(initial=0) <= _ZERO",
        test="tests/rollout/test_top_codec.py::test_what_has_a_code_takes_six_bytes",
    ),
    SeededBug(
        name="most likely ids count 6 bytes where they are sent in 8",
        file="megatron_gspo/rollout/sample_exchange.py",
        before="ids.shape[1] * pair_bytes(ids, log_probs)",
        after="ids.shape[1] * 6",
        test=(
            "tests/rollout/test_sample_exchange.py"
            "::test_most_likely_ids_count_as_what_is_sent_of_them[262144]"
        ),
    ),
    SeededBug(
        name="one token among the ids that could be drawn is enough",
        file="megatron_gspo/rollout/server_engine/response_checks.py",
        before="np.bincount(numbers[is_drawn], minlength=len(rows)).all()",
        after="is_drawn.any()",
        test="tests/rollout/vllm/test_response_parser.py::test_the_ids_that_could_be_drawn_have_finite_log_probs",
    ),
    SeededBug(
        name="the ids that could be drawn begin with one of the token before",
        file="megatron_gspo/data/packing.py",
        before="support[is_present] = ids[ranges(starts, lengths)]",
        after="support[is_present] = np.roll(ids[ranges(starts, lengths)], 1)",
        test=(
            "tests/data/test_packing.py"
            "::test_the_ids_that_could_be_drawn_are_packed_with_their_token"
        ),
    ),
    SeededBug(
        name="SGLang's log-probs over the vocabulary beside the ids that could be drawn",
        file="megatron_gspo/rollout/sglang/response_parser.py",
        before="log_probs = _log_probs_over_support(meta, len(tokens), context)",
        after="pass",
        test=(
            "tests/rollout/sglang/test_response_parser.py"
            "::test_the_ids_that_could_be_drawn_and_log_probs_over_them"
        ),
    ),
    SeededBug(
        name="observations of an episode are trained on",
        file="megatron_gspo/agents/session_tree.py",
        before="loss_mask = np.zeros(response_length, dtype=bool)",
        after="loss_mask = np.ones(response_length, dtype=bool)",
        test="tests/environments/test_episodes.py::test_an_episode_by_hand",
    ),
    SeededBug(
        name="every turn of an episode draws with the same numbers",
        file="megatron_gspo/agents/agent_run.py",
        before="numbers_of_call + node.prompt_digest",
        after="numbers_of_call",
        test="tests/environments/test_episodes.py::test_draws_are_a_function_of_prompt_sample_and_turn",
    ),
    SeededBug(
        name="staleness of masked tokens counts",
        file="megatron_gspo/loop/sample_metrics.py",
        before="responses['token_versions'][responses['loss_mask']]",
        after="responses['token_versions']",
        test="tests/loop/test_sample_metrics.py::test_staleness_by_hand",
    ),
    SeededBug(
        name="two sequences are swapped between replicas",
        file="megatron_gspo/rollout/sample_exchange.py",
        before="encode_samples([leaving[i] for i in to_rank], to_rank)",
        after="encode_samples([leaving[i] for i in to_rank], to_rank[::-1])",
        test="tests/rollout/test_sample_exchange.py::test_every_sample_is_on_each_rank_of_its_replica_and_nowhere_else",
    ),
    SeededBug(
        name="the rows of a rank's samples are in each other's places",
        file="megatron_gspo/parallel/host_exchange.py",
        before="words[local[inside], 1:] =",
        after="words[local[inside][::-1], 1:] =",
        test="tests/data/test_sample_batch.py::test_what_ranks_know_of_each_others_samples",
    ),
    SeededBug(
        name="a sequence is trained by two replicas",
        file="megatron_gspo/data/micro_batch_plan.py",
        before="np.flatnonzero(replica == r)",
        after="np.flatnonzero(replica >= r)",
        test="tests/data/test_micro_batch_plan.py::test_every_sequence_is_once_on_its_replica",
    ),
    SeededBug(
        name="a pipeline stage keeps the loss masks of before a rejection",
        file="megatron_gspo/data/training_batch.py",
        before="inputs=self.inputs.with_column('trained', trained)",
        after="inputs=self.inputs",
        test="tests/data/test_training_batch.py::test_all_stages_know_what_the_last_ones_hold",
    ),
    SeededBug(
        name="groups have the order in which servers finished them",
        file="megatron_gspo/loop/generation.py",
        before="batch.select(np.argsort([submitted[index] for index in indices], kind='stable'))",
        after="batch",
        test=(
            "tests/loop/test_generation.py::test_servers_generate_while_the_first_groups_are_scored"
        ),
    ),
    SeededBug(
        name="a source has the weight of another one",
        file="megatron_gspo/data/prompt_mix.py",
        before="[weight / sum(given) for weight in given]",
        after="[weight / sum(given) for weight in given[::-1]]",
        test="tests/data/test_prompt_mix.py::test_draws_by_hand",
    ),
    SeededBug(
        name="the rewards of sources are in each other's places",
        file="megatron_gspo/rewards/source_scorers.py",
        before="_in_order(scored, np.argsort(order))",
        after="_in_order(scored, np.arange(len(order)))",
        test="tests/rewards/test_source_scorers.py::test_each_response_gets_the_reward_of_its_source",
    ),
)
