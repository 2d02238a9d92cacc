"""What the divergence from a teacher over the whole vocabulary reads of it: hidden states of the
tokens that are scored, and the output weight.

A rank keeps the rows that it scored itself, micro-batch by micro-batch, so that no rank has another's
and none are sent. The updates of a step have the micro-batches of the teacher's pass
(`StepPlan.first_epoch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_gspo.mcore.device_copies import copy_to_host
from megatron_gspo.mcore.process_groups import compute_device
from megatron_gspo.parallel.collectives import gather_rows, group_rank
from megatron_gspo.parallel.log_probs import TeacherHead


@dataclass(frozen=True)
class TeacherStates:
    """A teacher's hidden states for consecutive micro-batches of this rank; none on stages without
    the loss."""

    hidden: Sequence[Tensor]
    """[c, h] of each micro-batch, in host memory: the rows of `ScoredRows.select_own`."""

    weight: Tensor | None
    """[V / tp, h] on the device, of the ids that the policy's rows have; None as above."""

    def of_micro_batches(self, start: int, count: int) -> TeacherStates:
        """The states of ``count`` micro-batches from ``start`` on."""
        return replace(self, hidden=self.hidden[start : start + count])

    def head(self, micro_batch: int) -> TeacherHead:
        """The teacher's head for a micro-batch, on the device."""
        assert self.weight is not None, "this stage has the loss"
        hidden = self.hidden[micro_batch].to(compute_device(), non_blocking=True)
        return TeacherHead(hidden, self.weight)


def kept_rows(hidden: Tensor) -> Tensor:
    """Rows [c, h] in host memory. What is not finite is 0: these responses are masked."""
    return copy_to_host(hidden.nan_to_num(0.0, 0.0, 0.0))


def rows_of_policy(weight: Tensor, count: int, tp_group: ProcessGroup) -> Tensor:
    """[count, h]: a copy of a teacher's output weight at the ids of this rank's rows of the policy,
    which has ``count`` rows on each rank.

    weight: this rank's rows, of as many on each rank. Ids beyond the teacher's are zeros. A collective
    of the group where both vocabularies are cut at different ids.
    """
    if len(weight) == count:
        return weight.detach().clone()
    first = group_rank(tp_group) * count
    rows = gather_rows(weight.detach(), tp_group)[first : first + count]
    return torch.cat((rows, rows.new_zeros(count - len(rows), rows.shape[1])))
