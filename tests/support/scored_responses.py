"""A verifier whose action the response selects, and a call that scores responses with it."""

from tests.support.samples import make_prompt, make_sample


def run(scorer, texts, **metadata):
    prompts = [make_prompt(0, **metadata), make_prompt(1, answer="5")]
    return scorer.score([make_sample(1, 1, seed=0, text=text) for text in texts], prompts)
