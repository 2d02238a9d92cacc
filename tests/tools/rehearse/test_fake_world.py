"""Process groups of a world without other processes."""

import pytest
import torch.distributed as dist

from megatron_gspo.tools.rehearse.fake_gpu import FakeGpu
from megatron_gspo.tools.rehearse.fake_world import fake_world
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError

from .on_fake_gpu import on_fake_gpu


@on_fake_gpu
def test_groups_of_others_cost_nothing() -> None:
    with fake_world(4095, 4096, FakeGpu().collectives):
        groups = [dist.new_group([first, first + 1]) for first in range(0, 4096, 2)]
        own_groups = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
        assert len(own_groups) == 1 and dist.get_process_group_ranks(own_groups[0]) == [4094, 4095]
        assert (own_groups[0].rank(), dist.get_world_size()) == (1, 4096)
    assert not dist.is_initialized()


@on_fake_gpu
def test_an_unknown_object_of_another_rank_is_an_error() -> None:
    sent = ["mine"]
    with fake_world(0, 2, FakeGpu().collectives):
        dist.broadcast_object_list(sent, src=0)
        with pytest.raises(RehearsalError, match="test_fake_world.py"):
            dist.broadcast_object_list(sent, src=1)
