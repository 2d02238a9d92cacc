"""Which ranks of a world are rehearsed: one of each role, and which other ranks each of them stands
for.

Megatron orders ranks by ``tp-cp-dp-pp``, and for experts by ``etp-ep-edp-pp``: the first is the
innermost. A role is a pipeline stage (first, middle, last) together with a place (first, last) in
one of the other dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_gspo.config import ParallelConfig
from megatron_gspo.errors import InputError

# Within a pipeline stage; experts have their own three.
DIMENSIONS = ("tp", "cp", "dp", "etp", "ep", "edp")
MOST_RANKS = 64  # of `--ranks all`
_NAMES = {
    "tp": "tensor rank",
    "cp": "context rank",
    "dp": "data rank",
    "etp": "expert tensor rank",
    "ep": "expert rank",
    "edp": "expert data rank",
}


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a world by their coordinates.

    sizes: of ``DIMENSIONS``; stages: pipeline stages.
    """

    world: int
    stages: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> RankGrid:
        """The grid of a layout that `Config.check` accepts for ``world`` ranks."""
        stages = parallel.pipeline_model_parallel_size
        experts = parallel.expert_model_parallel_size
        tensor = parallel.tensor_model_parallel_size
        context = parallel.context_parallel_size
        data = parallel.data_parallel_size(world)
        expert_data = world // (stages * experts * parallel.expert_tensor_size)
        return cls(
            world,
            stages,
            (tensor, context, data, parallel.expert_tensor_size, experts, expert_data),
        )

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage, which are consecutive."""
        return self.world // self.stages

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        tensor, context, _, expert_tensor, experts, _ = self.sizes
        return (1, tensor, tensor * context, 1, expert_tensor, expert_tensor * experts)

    def stage(self, rank: int) -> int:
        return rank // self.stage_size

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The rank's place in each of ``DIMENSIONS``."""
        offset = rank % self.stage_size
        return tuple(
            offset // stride % size for stride, size in zip(self._strides, self.sizes, strict=True)
        )

    def group(self, rank: int, dimension: int) -> range:
        """The ranks that differ from ``rank`` in this one of ``DIMENSIONS`` only, the rank
        itself among them.
        """
        stride = self._strides[dimension]
        size = self.sizes[dimension]
        first = rank - self.coordinates(rank)[dimension] * stride
        return range(first, first + size * stride, stride)


@dataclass(frozen=True)
class PlayedRank:
    """A rank to rehearse. roles: such as ``last stage``; stands_for: all ranks that it
    represents, itself included.
    """

    rank: int
    roles: tuple[str, ...]
    stands_for: tuple[int, ...]


def choose_ranks(
    parallel: ParallelConfig, world: int, chosen: str = "all-roles"
) -> list[PlayedRank]:
    """The ranks to rehearse, ascending.

    ``all-roles``: the fewest ranks such that in each rehearsed pipeline stage the first and the
    last rank of a group of each dimension are among them. ``all``: every rank, in worlds of at most
    ``MOST_RANKS``. ``stages``: the first rank of each rehearsed stage, which is the fullest of its
    stage. Otherwise a list such as ``0,5``. Ranks of a list, or of ``all``, stand for no others.
    Raises ``InputError``.
    """
    grid = RankGrid.of(parallel, world)
    if chosen in ("all-roles", "stages"):
        offsets = _covering_offsets(grid) if chosen == "all-roles" else (0,)
        stages = stage_roles(grid.stages)
        ranks = sorted(stage * grid.stage_size + offset for stage in stages for offset in offsets)
        represented = _representatives(grid, ranks)
        return [PlayedRank(rank, role_names(grid, rank), represented[rank]) for rank in ranks]
    if chosen == "all":
        if world > MOST_RANKS:
            raise InputError(
                f"--ranks all: at most {MOST_RANKS} ranks, not {world:,}; use all-roles or a list"
            )
        ranks = list(range(world))
    else:
        ranks = _parse_list(chosen, world)
    return [PlayedRank(rank, role_names(grid, rank), (rank,)) for rank in ranks]


def stage_roles(stages: int) -> dict[int, str]:
    """The pipeline stages to rehearse: the first, the one after it in place of all in the
    middle, and the last.
    """
    if stages == 1:
        return {0: ""}
    middle = {1: "middle stage"} if stages > 2 else {}
    return {0: "first stage", **middle, stages - 1: "last stage"}


def role_names(grid: RankGrid, rank: int) -> tuple[str, ...]:
    """What the rank is first or last of, dimensions of size 1 left out; ``only rank`` where
    nothing is divided.
    """
    stage = stage_roles(grid.stages)[_stage_role(grid, rank)]
    names = [stage] if stage else []
    for dimension, at, size in zip(DIMENSIONS, grid.coordinates(rank), grid.sizes, strict=True):
        if size > 1 and at in (0, size - 1):
            names.append(f"{'last' if at else 'first'} {_NAMES[dimension]}")
    return tuple(names) or (("only rank",) if grid.world == 1 else ("middle rank",))


def ranges(ranks: Sequence[int]) -> str:
    """Ascending ranks in few words: ``0-3, 8``; ``0, 2 ... 14`` for equal steps."""
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 4 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    words = []
    start = 0
    for i, rank in enumerate(ranks):
        if i + 1 == len(ranks) or ranks[i + 1] != rank + 1:
            words.append(f"{ranks[start]}-{rank}" if i > start else f"{rank}")
            start = i + 1
    return ", ".join(words) if len(words) <= 8 else f"{', '.join(words[:7])} ... {ranks[-1]}"


def _parse_list(chosen: str, world: int) -> list[int]:
    words = [word.strip() for word in chosen.split(",")]
    if not all(word.isdecimal() for word in words):
        raise InputError(
            f"--ranks {chosen}: is not a list of ranks; write all-roles, stages, all or ranks such"
            " as 0,5"
        )
    ranks = sorted({int(word) for word in words})
    if ranks[-1] >= world:
        raise InputError(
            f"--ranks {chosen}: no rank {ranks[-1]} in a world of {world:,}; the last is"
            f" {world - 1}"
        )
    return ranks


def _covering_offsets(grid: RankGrid) -> tuple[int, ...]:
    """The fewest ranks of one stage such that each dimension has its first and last rank in one
    group among them.

    Found by adding to rank 0, one after the other, ranks that complete a dimension, in all ways.
    """
    wanted = frozenset(dimension for dimension, size in enumerate(grid.sizes) if size > 1)
    reached: dict[tuple[int, ...], frozenset[int]] = {(0,): frozenset()}
    while not (found := [offsets for offsets, complete in reached.items() if complete == wanted]):
        grown: dict[tuple[int, ...], frozenset[int]] = {}
        for offsets, complete in reached.items():
            for offset in offsets:
                for dimension, other in _ends(grid, offset):
                    if dimension not in complete:
                        added = {at for at, end in _ends(grid, other) if end in offsets}
                        grown[tuple(sorted({*offsets, other}))] = complete | added
        reached = grown
    return min(found)


def _ends(grid: RankGrid, rank: int) -> Iterator[tuple[int, int]]:
    """For each dimension, the rank at the other end of the group; none where this rank is at
    neither end.
    """
    for dimension, (at, size) in enumerate(zip(grid.coordinates(rank), grid.sizes, strict=True)):
        if size > 1 and at in (0, size - 1):
            yield dimension, grid.group(rank, dimension)[0 if at else -1]


def _stage_role(grid: RankGrid, rank: int) -> int:
    """The rehearsed stage of ``stage_roles`` that a rank's own stage is like."""
    stage = grid.stage(rank)
    return stage if stage in (0, grid.stages - 1) else 1


def _representatives(grid: RankGrid, played: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Every rank of the world under the played rank of its stage's role that is last in the
    most equal dimensions.
    """

    def last_in(rank: int) -> tuple[bool, ...]:
        return tuple(
            at == size - 1 for at, size in zip(grid.coordinates(rank), grid.sizes, strict=True)
        )

    ends = {rank: last_in(rank) for rank in played}
    members: dict[int, list[int]] = {rank: [] for rank in played}
    for rank in range(grid.world):
        like = _stage_role(grid, rank)
        own = last_in(rank)
        same_stage = [other for other in played if grid.stage(other) == like]
        differences = {
            other: sum(a != b for a, b in zip(own, ends[other], strict=True))
            for other in same_stage
        }
        members[
            rank if rank in ends else min(same_stage, key=lambda other: (differences[other], other))
        ].append(rank)
    return {rank: tuple(others) for rank, others in members.items()}
