"""The error that ends a rehearsal."""

from megatron_gspo.errors import RunError


class RehearsalError(RunError):
    """The program does what the rehearsal can't follow; names the operation and the line."""
