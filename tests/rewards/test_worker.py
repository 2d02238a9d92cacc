"""What a worker returns for one response."""

from megatron_gspo.rewards.worker import run_verifier
from tests.support.samples import make_prompt


def test_run_verifier_shortens_messages():
    def verifier(text, prompt):
        raise ValueError("x" * 10_000 + "\n")

    status, value, message = run_verifier(verifier, "", make_prompt())
    assert (status, value, len(message)) == ("error", None, 300)
