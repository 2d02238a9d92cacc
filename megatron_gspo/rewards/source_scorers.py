"""Rewards by the verifier of each prompt's source (`data.sources`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_gspo.config import DataConfig
from megatron_gspo.data.sample import Prompt
from megatron_gspo.rewards.scorer import RewardScorer, Scores, scorer_of


class SourceScorers:
    """Scores each response with the verifier of its prompt's source.

    scorers: by the name of the source; "" is that of prompts without one. Sources may share a
    scorer. description: what the verifiers say of themselves in one line, None for nothing.
    needs_whole_batch: whether a verifier must see all responses of a batch at once.
    """

    def __init__(self, scorers: Mapping[str, RewardScorer]) -> None:
        self._scorers = dict(scorers)
        self._distinct = list(dict.fromkeys(scorers.values()))
        said = [scorer.description for scorer in self._distinct if scorer.description]
        self.description = "; ".join(said) or None
        self.needs_whole_batch = any(scorer.needs_whole_batch for scorer in self._distinct)

    def score_texts(self, requests: Sequence[tuple[str, Prompt]]) -> Scores:
        """Rewards of responses, each with its prompt, in their order."""
        order: list[int] = []
        scored: list[Scores] = []
        # All, also those without a request, whose counts are 0: every rank has the same names.
        for scorer in self._distinct:
            chosen = [
                i
                for i, (_, prompt) in enumerate(requests)
                if self._scorers[prompt.source] is scorer
            ]
            order += chosen
            scored.append(scorer.score_texts([requests[i] for i in chosen]))
        return _in_order(scored, np.argsort(order))

    def release(self) -> None:
        """See `RewardScorer.release`."""
        for scorer in self._distinct:
            scorer.release()

    def close(self) -> None:
        """End the worker processes."""
        for scorer in self._distinct:
            scorer.close()


def source_scorers(data: DataConfig) -> SourceScorers:
    """The verifiers of all sources. Sources with the same verifier and the same limits share its
    workers. Raises VerifierError if one can't be loaded.
    """
    made: dict[str, RewardScorer] = {}
    scorers = {}
    for name, source in data.by_source.items():
        settings = repr(
            (source.resolved_verifier, source.resolved_verifier_options, source.verifier_timeout)
        )
        if settings not in made:
            made[settings] = scorer_of(source)
        scorers[name] = made[settings]
    return SourceScorers(scorers)


def _in_order(scored: Sequence[Scores], positions: np.ndarray) -> Scores:
    """Scores one after another, in the order of `positions` [N]."""
    statuses = [status for scores in scored for status in scores.statuses]
    messages = [message for scores in scored for message in scores.messages]
    counts: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for scores in scored:
        counts.update(scores.counts)
        verdicts.update(scores.verdicts)
    return Scores(
        rewards=np.concatenate([scores.rewards for scores in scored])[positions],
        statuses=tuple(statuses[i] for i in positions),
        messages=tuple(messages[i] for i in positions),
        counts=dict(counts),
        verdicts=dict(verdicts),
    )
