"""An environment that fails for half of a group: one sample raises, one hangs."""

import time

from megatron_gspo.environments.environment import Turn


class Failing:
    def __init__(self, sample_index, always):
        self.sample_index = sample_index
        self.always = always

    def step(self, response):
        if self.always or self.sample_index == 0:
            raise ValueError("no such tool")
        if self.sample_index == 1:
            time.sleep(60)
        return Turn(reward=float(self.sample_index == 2), done=True)


def failing(prompt, *, sample_index, seed, always=False):
    return Failing(sample_index, always)
