"""A real server as a judge: a random model writes what the schema leaves open."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gspo.rewards.scorer import RewardScorer, Scores
from megatron_gspo.tools.make_tiny_model import character_tokenizer
from tests.support.ports import free_port
from tests.support.real_servers import signal_server
from tests.support.samples import make_prompt


def scores_of(
    url: str, model: str, responses: Sequence[str], verifier: str = "judge", **options: Any
) -> Scores:
    """The scores of responses to one prompt."""
    ids = character_tokenizer().get_vocab()
    ends_early = {str(ids[character]): 100 for character in '"}'}  # of strings and numbers
    request = {"temperature": 1.0, "max_tokens": 100, "logit_bias": ends_early}
    settings = {
        "servers": [url],
        "model": model,
        "instructions": "Grade it.",
        "request": request,
        "attempts": 20,  # the model may not end
    }
    prompt = make_prompt(answer="4")
    prompt.messages = [{"role": "user", "content": "2 + 2?"}]
    with RewardScorer(verifier, settings | options, timeout=None) as scorer:
        return scorer.score_texts([(response, prompt) for response in responses])


def assert_it_judges(url: str, model: str, module: str, folder: Path) -> None:
    """Its answers have the form of the schema and are kept, and a server that hangs is named.

    module: that the server runs, see `signal_server`.
    """
    cache = str(folder / "answers.db")
    scores = scores_of(url, model, ["4", "5", "4"], cache=cache)
    assert scores.statuses == ("ok",) * 3, scores.messages
    assert ((scores.rewards >= 0) & (scores.rewards <= 1)).all()
    assert scores.rewards[0] == scores.rewards[2]
    nowhere = f"http://127.0.0.1:{free_port()}"
    kept = scores_of(nowhere, model, ["5", "4"], cache=cache)
    np.testing.assert_array_equal(kept.rewards, scores.rewards[[1, 0]])
    # The server takes the schema of a ranking, in which a random model may name a response twice.
    ranked = scores_of(url, model, ["4", "5"], "judge_ranking")
    assert all("the answer" in message for message in ranked.messages if message), ranked.messages
    signal_server(url, module, signal.SIGSTOP)
    try:
        hanging = scores_of(url, model, ["6"], time_limit=2.0)
    finally:
        signal_server(url, module, signal.SIGCONT)
    assert np.isnan(hanging.rewards[0])
    assert hanging.messages[0] == (
        f"JudgeError: no answer within 2 s (server {url}: it has not answered yet)"
    )
    assert scores_of(url, model, ["6"]).statuses == ("ok",)
