"""Bugs of the rehearsal: whose memory is counted, and which ranks form a group."""

from __future__ import annotations

from tests.seeded_bugs.seeded_bug import SeededBug

REHEARSAL = (
    SeededBug(
        name="a view is counted as memory of its own",
        file="tools/rehearse/memory_log.py",
        before="if key in self.live or not size:",
        after="if not size:",
        test="tests/tools/rehearse/test_memory_log.py::test_a_view_is_not_counted_again",
    ),
    SeededBug(
        name="memory that is freed early counts as alive",
        file="tools/rehearse/memory_log.py",
        before="torch.UntypedStorage.resize_ = resize_",
        after="pass",
        test="tests/tools/rehearse/test_memory_log.py::test_freed_storage_of_a_live_tensor_is_seen",
    ),
    SeededBug(
        name="the memory that CUDA takes is left out",
        file="tools/rehearse/summary.py",
        before="rehearsal.gpu.memory - rehearsal.runtime_bytes",
        after="rehearsal.gpu.memory",
        test="tests/tools/rehearse/test_summary.py::test_out_of_memory_counts_what_cuda_takes",
    ),
    SeededBug(
        name="expert ranks are grouped as the ranks of dense layers",
        file="tools/rehearse/roles.py",
        before="(1, tensor, tensor * context, 1, expert_tensor, expert_tensor * experts)",
        after="(1, tensor, tensor * context, 1, tensor, tensor * context)",
        test="tests/tools/rehearse/test_roles.py::test_groups_are_megatrons",
    ),
    SeededBug(
        name="all experts of a token are on one rank",
        file="tools/rehearse/routing.py",
        before="_shuffled(num_experts)[in_turn % num_experts]",
        after="in_turn % num_experts",
        test="tests/tools/rehearse/test_routing.py::test_the_experts_of_a_token_are_on_as_many_ranks_as_random_ones",
    ),
)
