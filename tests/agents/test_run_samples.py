"""A finished run as a sample."""

import math

import numpy as np

from megatron_gspo.agents.agent_session import FinishedRun, Outcome
from megatron_gspo.agents.conversation import Message
from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.agents.run_samples import run_sample
from megatron_gspo.agents.runner import AgentExit
from megatron_gspo.agents.session_tree import SessionTree
from megatron_gspo.data.sample import Prompt
from megatron_gspo.data.turn_spans import Span, spans
from megatron_gspo.rewards.scorer import FAILURE

PROMPT = Prompt(7, np.array([90, 91]), "task")


def deliver(tree: SessionTree, prompt: list[int], reply: list[int], version: int) -> list[int]:
    """The tokens of a new call."""
    node = tree.begin(np.array(prompt), CallLimits(len(reply)))
    tokens = np.array(reply)
    routes = np.stack(
        [np.array([prompt + reply])[0][:-1] % 5, np.zeros(len(prompt + reply) - 1)], 1
    )
    parent = tree.parent_of(node.prompt)
    known = 0 if parent is None else max(parent.length - 1, 0)
    generation = Generation(
        tokens,
        -tokens.astype(np.float32),
        np.full(len(reply), version, dtype=np.int32),
        "stop",
        routes.astype(np.uint8)[known:, None],
    )
    message = Message("assistant", str(reply))
    tree.deliver(node, generation, messages=(Message("user", str(prompt)), message))
    return [*prompt, *reply]


def finished(tree: SessionTree, outcome: Outcome, turn_rewards: dict[int, float]) -> FinishedRun:
    return FinishedRun(
        rows=tuple(tree.rows()),
        messages=tree.delivered[-1].messages if tree.delivered else (),
        outcome=outcome,
        turn_rewards=turn_rewards,
        counts={"calls": len(tree.delivered)},
        exit=AgentExit(0, False, ""),
    )


def test_two_branches_by_hand() -> None:
    tree = SessionTree()
    root = deliver(tree, [1, 2], [3, 4], 5)
    deliver(tree, [*root, 6], [7], 5)
    deliver(tree, [*root, 8, 9], [10, 11], 6)
    sample = run_sample(PROMPT, 2, finished(tree, Outcome(1.0), {0: 0.25}))
    sample.check()
    assert (sample.prompt_index, sample.sample_index, sample.prompt_length) == (7, 2, 2)
    assert sample.tokens.tolist() == [1, 2, 3, 4, 6, 7, 1, 2, 3, 4, 8, 9, 10, 11]
    assert sample.row_lengths is not None and sample.row_lengths.tolist() == [6, 8]
    assert sample.rollout_log_probs is not None and sample.token_versions is not None
    # The reply [3, 4] is trained in the first row alone.
    assert sample.loss_mask.astype(int).tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]
    trained = sample.rollout_log_probs[sample.loss_mask]
    assert trained.tolist() == [-3, -4, -7, -10, -11]
    assert sample.token_versions[sample.loss_mask].tolist() == [5, 5, 5, 6, 6]
    assert sample.weight_version == 5
    assert spans(sample) == [Span(0, 2, 0.25), Span(3, 4, 0.0), Span(10, 12, 0.75)]
    assert (sample.reward, sample.text) == (1.0, "[10, 11]")
    assert sample.routed_experts is not None and sample.missing_routes is None
    fed = np.delete(np.arange(13), 5)  # the last token of the first row is not fed
    expected = (sample.tokens[:-1] % 5)[fed]
    assert sample.routed_experts[fed, 0, 0].tolist() == expected.tolist()


def test_a_run_without_a_reward() -> None:
    tree = SessionTree()
    deliver(tree, [1], [2, 3], 0)
    sample = run_sample(PROMPT, 0, finished(tree, Outcome(math.nan, "timeout: 3 s"), {}))
    sample.check()
    assert math.isnan(sample.reward) and spans(sample) == [Span(0, 2, 0.0)]
    assert sample.metadata[FAILURE] == "timeout: 3 s"


def test_a_run_without_a_call_has_nothing_to_train() -> None:
    sample = run_sample(PROMPT, 1, finished(SessionTree(), Outcome(math.nan, "error: none"), {}))
    sample.check()
    assert sample.tokens.tolist() == [90, 91] and sample.response_length == 0
    assert spans(sample) == [] and sample.row_lengths is not None
