"""Prompts to groups: seeds, the data cursor, dynamic sampling."""

from megatron_gspo.loop.generation import rollout_seed


def test_every_step_of_every_run_has_a_sampling_seed_of_its_own():
    seeds = {(seed, step): rollout_seed(seed, step) for seed in range(4) for step in range(200)}
    assert len(set(seeds.values())) == len(seeds)
    assert all(rollout_seed(*key) == value for key, value in seeds.items())
