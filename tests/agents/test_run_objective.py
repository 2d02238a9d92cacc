"""The rows of a run as one sequence of the objective: one ratio, one advantage, one weight a run.

`policy_loss` takes the run of each token in `segment_ids`, whichever row the token is in.
"""

import numpy as np
import torch

from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.agents.session_tree import Row, SessionTree
from megatron_gspo.algorithms import LossExtras, policy_loss, preset


def run_of(rng: np.random.Generator, branches: int) -> SessionTree:
    """A run with a shared first call and `branches` calls behind it."""
    tree = SessionTree()

    def serve(prompt: np.ndarray) -> np.ndarray:
        tokens = rng.integers(2, 99, rng.integers(1, 6))
        log_probs = -rng.random(len(tokens), dtype=np.float32)
        node = tree.begin(prompt, CallLimits(len(tokens)))
        versions = np.zeros(len(tokens), np.int32)
        tree.deliver(node, Generation(tokens, log_probs, versions, "stop"), messages=())
        return np.concatenate([prompt, tokens])

    shared = serve(rng.integers(2, 99, 4))
    for _ in range(branches):
        serve(np.concatenate([shared, rng.integers(2, 99, 3)]))
    return tree


def test_a_run_with_branches_is_one_sequence() -> None:
    rng = np.random.default_rng(0)
    runs = [run_of(rng, branches) for branches in (1, 3, 5)]
    row_of_run: list[tuple[int, Row]] = [
        (number, row) for number, run in enumerate(runs) for row in run.rows()
    ]
    assert [number for number, _ in row_of_run] == [0, 1, 1, 1, 2, 2, 2, 2, 2]
    lengths = [len(row.loss_mask) for _, row in row_of_run]
    segment_ids = torch.from_numpy(np.repeat([number for number, _ in row_of_run], lengths))
    mask = torch.from_numpy(np.concatenate([row.loss_mask for _, row in row_of_run]))
    old = torch.from_numpy(np.concatenate([row.log_probs for _, row in row_of_run])).double()
    moved = torch.from_numpy(rng.normal(scale=0.01, size=len(old)))
    new = (old + moved).requires_grad_()
    advantages = torch.tensor([0.9, -0.3, -0.6], dtype=torch.float64)
    objective = preset("gspo", epsilon_low=0.001, epsilon_high=0.001)
    loss, _ = policy_loss(
        objective,
        log_probs=new,
        old_log_probs=old,
        advantages=advantages[segment_ids],
        loss_mask=mask,
        segment_ids=segment_ids,
        num_sequences=len(runs),
        num_tokens=int(mask.sum()),
        extras=LossExtras(num_segments=len(runs)),
    )
    (gradient,) = torch.autograd.grad(loss, new)

    expected = torch.zeros((), dtype=torch.float64)
    for number, run in enumerate(runs):
        trained = mask & (segment_ids == number)
        # Every delivered token once.
        assert int(trained.sum()) == sum(len(node.reply.tokens) for node in run.delivered)
        ratio = torch.exp((new - old)[trained].mean())
        clipped = ratio.clamp(0.999, 1.001)
        advantage = advantages[number]
        expected = expected - torch.minimum(ratio * advantage, clipped * advantage) / len(runs)
    (wanted,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)
    assert 0 < int((gradient != 0).sum()) < int(mask.sum())  # a run is clipped
