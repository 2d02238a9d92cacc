"""An environment of messages that edits its history: two calls on, one of another history."""

from megatron_gspo.environments.environment import Turn


class Conversing:
    tools = []

    def __init__(self, prompt, *, sample_index, seed):
        self.question = prompt.text
        self.sample_index = sample_index
        self.num_turns = 0

    def step(self, message):
        assert message["role"] == "assistant"
        self.num_turns += 1
        if self.num_turns == 1:
            return Turn("\nagain ", reward=len(message["content"]) / 12)
        if self.num_turns == 2:
            return Turn(messages=[{"role": "user", "content": self.question[::-1]}])
        return Turn(reward=float(self.sample_index % 2), done=True)
