"""Bugs of episodes, of the advantages of their turns and of the correction between the engines."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

EPISODES, TURNS = "megatron_gspo/environments/episodes.py", "megatron_gspo/algorithms/turn_advantages.py"
MISMATCH = "megatron_gspo/loop/rollout_correction.py"
HAND = "tests/environments/test_episodes.py::test_an_episode_by_hand"
EXCHANGE = "megatron_gspo/rollout/sample_exchange.py"
PLACED = "tests/rollout/test_sample_exchange.py::test_every_sample_is_on_each_rank_of_its_replica_and_nowhere_else"
HOST, SCORED = "megatron_gspo/parallel/host_exchange.py", "tests/loop/test_reward_scoring.py"
BATCH = "megatron_gspo/data/sample_batch.py"
STAGES = "tests/data/test_sample_batch.py::test_all_stages_know_what_the_last_ones_hold"
NAIVE = "tests/algorithms/test_turn_advantages.py::test_against_a_naive_loop"

OF_THE_ROLLOUTS = (
    SeededBug(
        "observations of an episode are trained on", "several trainers", EPISODES,
        "return cls(ids, np.zeros(n, dtype=bool), zeros", "return cls(ids, np.ones(n, dtype=bool), zeros", (HAND,),
    ),
    SeededBug(
        "every turn of an episode draws with the same numbers", "design", EPISODES,
        "request_index(self.prompt.index, self.sample_index, len(self._responses))",
        "request_index(self.prompt.index, self.sample_index, 0)",
        ("tests/environments/test_episodes.py::test_draws_are_a_function_of_prompt_sample_and_turn",),
    ),
    SeededBug(
        "an episode is worth its last turn alone", "several trainers", EPISODES,
        "reward=sum(span.reward for span in self._spans) if scored", "reward=self._spans[-1].reward if scored", (HAND,),
    ),
    SeededBug(
        "an episode's turns compared with all turns", "one trainer", TURNS,
        "turn_numbers(torch.as_tensor(episode_ids))])", "torch.zeros_like(torch.as_tensor(episode_ids))])", (NAIVE,),
    ),
    SeededBug(
        "returns run on into the next episode", "design", TURNS,
        "        if same_episode[k]:\n", "        if True:\n", (NAIVE,),
    ),
    SeededBug(
        "weights of a sequence count tokens that are masked out", "design", MISMATCH,
        '(("rollout_rs", _reject), ("rollout_is", _weight))',
        '(("rollout_is", _weight), ("rollout_rs", _reject))',
        ("tests/loop/test_rollout_correction.py::test_the_weight_of_a_sequence_is_that_of_the_tokens_left",),
    ),
    SeededBug(
        "staleness of masked tokens counts", "design", "megatron_gspo/data/sample.py",
        "return self.token_versions[self.loss_mask]", "return self.token_versions",
        ("tests/loop/test_sample_metrics.py::test_staleness_by_hand",),
    ),
    SeededBug(
        "a sequence is lost between replicas", "design", EXCHANGE,
        "own = [i for i in positions.tolist() if i in leaving]",
        "every = [i for i in positions.tolist() if i in leaving]\n"
        "    own = every[1:] or every",  # one of several
        (PLACED,),
    ),
    SeededBug(
        "two sequences are swapped between replicas", "design", EXCHANGE,
        "encode_samples([leaving[i] for i in mine], mine)", "encode_samples([leaving[i] for i in mine], mine[::-1])",
        (PLACED,),
    ),
    SeededBug(
        "a sequence is on two replicas", "design", EXCHANGE,
        "mine = [i for i in own if target[i] == rank]", "mine = [i for i in own if target[i] >= rank]", (PLACED,),
    ),
    SeededBug(
        "the rows of a rank's samples are in each other's places", "design", HOST,
        "words[own[inside], 1:] = rows[inside]", "words[own[inside][::-1], 1:] = rows[inside]",
        ("tests/data/test_sample_batch.py::test_what_ranks_know_of_each_others_samples",),
    ),
    SeededBug(
        "what stays on its rank is sent through the world", "this project", HOST,
        "    pairs = pairs[pairs[:, 0] != pairs[:, 1]]\n", "",
        ("tests/parallel/test_host_exchange.py::test_what_ranks_exchange",),
    ),
    SeededBug(
        "a rank scores all that it holds", "this project", "megatron_gspo/loop/reward_scoring.py",
        "waiting.extend(held[rank][part:].tolist())", "waiting.extend([])",
        (f"{SCORED}::test_responses_are_scored_where_they_are_unless_a_rank_holds_too_many",),
    ),
    SeededBug(
        "a sequence is trained by two replicas", "design", "megatron_gspo/data/micro_batch_plan.py",
        "mine = [np.flatnonzero(replica == r) for", "mine = [np.flatnonzero(replica >= r) for",
        ("tests/data/test_micro_batch_plan.py::test_every_sequence_is_once_on_its_replica",),
    ),
    SeededBug(
        "a pipeline stage keeps the loss masks of before a rejection", "design", BATCH,
        "        if self.pipeline is None:\n            return counted\n", "        return counted\n", (STAGES,),
    ),
    SeededBug(
        "a pipeline stage decides by the numbers that it has", "design", BATCH,
        "return found if self.pipeline is None else broadcast_array(",
        "return found if values.size else broadcast_array(", (STAGES,),
    ),
    SeededBug(
        "a sample has the routes of the sample before it", "design", "megatron_gspo/rollout/sample_codec.py",
        "routed_experts=routes[i][0],", "routed_experts=routes[i - 1][0],",
        ("tests/rollout/test_sample_codec.py::test_samples_survive_the_wire",),
    ),
    SeededBug(
        "groups have the order in which servers finished them", "design", "megatron_gspo/loop/generation.py",
        '        batch = batch.select(np.argsort([submitted[index] for index in indices], kind="stable"))\n', "",
        ("tests/loop/test_generation.py::test_servers_generate_while_the_first_groups_are_scored",),
    ),
)  # fmt: skip
