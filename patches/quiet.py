"""Filter the messages that upstream logs at every start on every rank and that need no action.

Upstream: megatron-core 0.16.1 to 0.19.2 (absent Transformer Engine and Apex, its own deprecations),
torch (renamed collectives that Megatron still calls). A filter names one message, or torch's and
Megatron's notes to each other about coming changes (``FutureWarning``): all other messages are
shown. Delete when: a message is no longer logged.
"""

from __future__ import annotations

import logging
import warnings

_MESSAGES = (
    ".*Apex (is|are) not installed.*",
    ".*Transformer Engine and Apex are not installed.*",
    "full scope is deprecated.*",
    "absl.logging is not installed.*",
    ".*MimoModelConfig is experimental.*",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1.*",  # experts with expert-TP 1
    "The .grad attribute of a Tensor that is not a leaf Tensor.*",
)
_LOGGERS = (
    "megatron.core.rerun_state_machine",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
)


def apply() -> None:
    """Add the filters; a second call has no effect."""
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message=message)
    for module in ("torch", "megatron"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=rf"{module}\.")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
