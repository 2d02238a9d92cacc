"""A custom verifier that gives random responses different rewards, so that every group has an
advantage.
"""


def score(response: str, prompt) -> float:
    return (sum(map(ord, response)) % 7) / 6


score.description = "verifier spelling: the sum of the letters"
