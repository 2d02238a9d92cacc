"""The process groups of one rank of a world that doesn't exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_gspo.mcore.meta_device import fake_process_group
from megatron_gspo.tools.rehearse.call_sites import call_site, frames_above
from megatron_gspo.tools.rehearse.collective_log import CollectiveLog
from megatron_gspo.tools.rehearse.rehearsal_error import RehearsalError


@contextlib.contextmanager
def fake_world(rank: int, size: int, log: CollectiveLog) -> Iterator[None]:
    """Within the context this process is ``rank`` of ``size``, and its groups report NCCL as
    theirs.
    """
    new_group = dist.new_group

    def fake_new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        log.groups_of_world += 1
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER  # at once: a large world has thousands of them
        log.groups_of_rank += 1
        made = new_group(ranks, *args, **{**kwargs, "backend": None, "pg_options": None})
        if kwargs.get("backend") == "gloo":
            log.gloo_groups.add(made.group_name)
        return made

    def fake_backend(group: Any = None) -> str:
        return "gloo" if group is not None and group.group_name in log.gloo_groups else "nccl"

    with fake_process_group(rank, size), contextlib.ExitStack() as stack:
        for name, value in {
            "new_group": fake_new_group,
            "get_backend": fake_backend,
            **_object_collectives(log),
        }.items():
            stack.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, value)
        yield


def _object_collectives(log: CollectiveLog) -> dict[str, Any]:
    """Torch sends pickled objects as tensors, whose sizes the receivers read; here there are no
    senders.
    """

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        group = group or dist.group.WORLD
        log.call_with_objects("all_gather_object", group)
        object_list[:] = [obj] * group.size()

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        log.call_with_objects("gather_object", group)
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        group = group or dist.group.WORLD
        log.call_with_objects("broadcast_object_list", group)
        source = dist.get_group_rank(group, src or 0) if group_src is None else group_src
        if source != group.rank():
            if object_list != [None]:
                here = " <- ".join(call_site(frames_above(1))[:3])
                raise RehearsalError(f"an object that another rank sends is unknown, at {here}")
            object_list[:] = [{}]  # metrics of the last pipeline stage; their values don't matter

    return {
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": broadcast_object_list,
    }
