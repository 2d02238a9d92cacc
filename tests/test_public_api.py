"""The five names that other code may rely on keep their place and their signature."""

from __future__ import annotations

import importlib
import inspect

import pytest

# A change here breaks the code of users: it needs a line in CHANGELOG.md and, from 1.0 on, a new
# major version.
PUBLIC = {
    "megatron_gspo.algorithms:preset": "(name, **overrides)",
    "megatron_gspo.algorithms:group_advantages": (
        "(rewards, group_ids, *, std='sample', baseline='mean')"
    ),
    "megatron_gspo.algorithms:policy_loss": (
        "(objective, *, log_probs, old_log_probs, advantages, loss_mask, segment_ids,"
        " num_sequences, num_tokens=None, extras=None)"
    ),
    "megatron_gspo.parallel:log_probs_from_hidden": (
        "(hidden, weight, labels, options=None, *, tp_group=None, sequence_parallel=False,"
        " scored=None)"
    ),
    "megatron_gspo.mcore.forward_step:policy_forward_step": (
        "(objective, *, num_microbatches, temperature=1.0, vocab_size=None, groups=None,"
        " routing=None, chunk_bytes=None, distillation=None, teacher=None,"
        " score_centering=None)"
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_keeps_its_signature(name: str) -> None:
    module, _, function = name.partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    shown = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    assert shown == PUBLIC[name]
