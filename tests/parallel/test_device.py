"""All temporaries are on the inputs' device, and nothing is read back: on the meta device both
would raise.
"""

import pytest
import torch

from megatron_gspo.parallel import reduce_metrics

from .calls import call_log_probs

META = torch.device("meta")


@pytest.mark.parametrize("chunk_bytes", [None, 600])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients(dtype, with_entropy, chunk_bytes):
    hidden, weight = (
        torch.empty(n, 4, device=META, dtype=dtype, requires_grad=True) for n in (6, 9)
    )
    labels = torch.empty(6, dtype=torch.long, device=META)
    results = call_log_probs(
        hidden, weight, labels, with_entropy=with_entropy, chunk_bytes=chunk_bytes, vocab_size=8
    )
    found = [x for x in results if x is not None]
    sum(x.sum() for x in found).backward()
    assert {x.device for x in (*found, hidden.grad, weight.grad)} == {META}
    with torch.no_grad():
        assert call_log_probs(hidden, weight, labels)[0].device == META


def test_metrics_go_where_the_first_tensor_is():
    reduced = reduce_metrics(
        {"loss": 1.0, "kl": torch.empty((), device=META), "n": torch.ones(())}, None
    )
    assert {x.device for x in reduced.values()} == {META}
