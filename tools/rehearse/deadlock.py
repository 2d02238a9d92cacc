"""Do the rehearsed ranks' collectives fit together? A deadlock or corrupt data, found from the
ranks' records.

Three comparisons: the calls of each group in order, member by member; the sends to each rank with
its receives; and, where these agree, whether all members reach each collective (two groups that two
ranks enter in opposite order agree call by call and still deadlock).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_gspo.tools.rehearse.records import Collective, RankRecord
from megatron_gspo.tools.rehearse.roles import ranges

POINT_TO_POINT = ("send", "recv")
ROOTED = ("gather", "scatter")  # the root holds as much as all others together
Programs = Mapping[int, Sequence[Collective]]
Peer = Callable[[int, int], tuple[int, int] | None]
_Group = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Side:
    """One rank of a disagreement.

    does: what it calls, with its size; where: the call site, innermost first.
    """

    rank: int
    does: str
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"rank {self.rank} {self.does}" + (f" at {self.where[0]}" if self.where else "")


@dataclass(frozen=True)
class Disagreement:
    """Two ranks that do not fit together.

    kind: ``missing`` (a call that one rank makes and the other skips), ``swapped``, ``deadlock``
    (ranks that wait for each other in a circle), or the fields that differ, such as ``bytes`` or
    ``op, dtype``. group: name and ranks; agreed: how many calls fit before.
    """

    kind: str
    group: str
    agreed: int
    first: Side
    second: Side

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.group}, after {self.agreed:,} calls that agree: {self.first};"
            f" {self.second}"
        )


@dataclass(frozen=True)
class ComparedGroup:
    """What was compared of all groups of one name: how many groups, their rehearsed members and
    calls.
    """

    groups: int
    members: int
    calls: int


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_ranks`.

    alone: names of the groups that have more members, of which one was rehearsed.
    """

    disagreements: tuple[Disagreement, ...]
    groups: Mapping[str, ComparedGroup]
    alone: tuple[str, ...]


def compare_ranks(records: Sequence[RankRecord]) -> Comparison:
    """Compare the collectives of all rehearsed ranks of one world.

    A send or receive of which the other rank was not rehearsed is compared with the rank that
    stands for it.
    """
    programs = {record.rank: record.collectives for record in records}
    calls = _calls(programs)
    disagreements = compare_groups(programs) + compare_point_to_point(programs, stand_ins(records))
    compared: dict[str, ComparedGroup] = {}
    for (name, _), members in calls.items():
        if len(members) > 1:
            old = compared.get(name, ComparedGroup(0, 0, 0))
            count = sum(map(len, members.values()))
            compared[name] = ComparedGroup(
                old.groups + 1, old.members + len(members), old.calls + count
            )
    alone = sorted({name for name, ranks in calls if len(ranks) > 1} - set(compared))
    return Comparison(
        tuple(disagreements or find_circle(programs)), dict(sorted(compared.items())), tuple(alone)
    )


def compare_groups(programs: Programs) -> list[Disagreement]:
    """The first disagreement of each rehearsed member of each group with the first rehearsed
    member.
    """
    disagreements = []
    for group, members in _calls(programs).items():
        first, *others = members
        for other in others:
            pair = _Pair(group, (first, other), members[first], members[other])
            at = pair.parting()
            if at is not None:
                disagreements.append(pair.explain(at))
    return disagreements


def compare_point_to_point(programs: Programs, peer_of: Peer) -> list[Disagreement]:
    """Each rank's sends to each other rank against the receives there, in order, and the receives
    likewise.

    peer_of: for a rank and a peer that was not rehearsed, the rehearsed rank that stands for the
    peer, and its own peer in the place of the rank; None if there is none.
    """
    traffic: dict[tuple[str, int, int], list[Collective]] = defaultdict(list)
    for rank, program in programs.items():
        for call in program:
            if call.op in POINT_TO_POINT and call.peer is not None:
                traffic[call.op, rank, call.peer].append(call)
    disagreements = []
    for (op, rank, peer), ours in sorted(traffic.items()):
        back = (peer, rank) if peer in programs else peer_of(rank, peer)
        other = "recv" if op == "send" else "send"
        if back is None or (op == "recv" and back == (peer, rank) and traffic.get((other, *back))):
            continue  # the sends there are compared with these
        theirs = traffic.get((other, *back), [])
        fields = [_differing(a, b, ("dtype", "bytes")) for a, b in zip(ours, theirs, strict=False)]
        at = next((i for i, names in enumerate(fields) if names), min(len(ours), len(theirs)))
        if at < max(len(ours), len(theirs)):
            kind = ", ".join(fields[at]) if at < len(fields) else "missing"
            name = f"{op} of rank {rank} {'to' if op == 'send' else 'from'} {peer}"
            disagreements.append(
                Disagreement(
                    kind, name, at, _side_at(rank, ours, at), _side_at(back[0], theirs, at)
                )
            )
    return disagreements


def stand_ins(records: Sequence[RankRecord]) -> Peer:
    """``peer_of`` of `compare_point_to_point`, by pipeline stages: a rank of a stage in the middle
    stands for its peer, with the stages before and after it in the same order."""
    represented = {rank: record for record in records for rank in record.stands_for}

    def peer_of(rank: int, peer: int) -> tuple[int, int] | None:
        record = represented.get(peer)
        if record is None:
            return None
        pipeline = record.groups["pp"]
        size = record.world // len(pipeline)
        distance = rank // size - peer // size
        return record.rank, pipeline[(record.rank // size + distance) % len(pipeline)]

    return peer_of


def find_circle(programs: Programs) -> list[Disagreement]:
    """Let the ranks run: at each collective a rank waits until all rehearsed members are at it.

    Returns two ranks of a circle that wait for each other, or nothing. Sends and receives don't
    wait here.
    """
    queues = {
        rank: [call for call in program if call.op not in POINT_TO_POINT]
        for rank, program in programs.items()
    }
    members = {group: list(calls) for group, calls in _calls(programs).items()}
    at = dict.fromkeys(programs, 0)

    def head(rank: int) -> _Group | None:
        return _group(queues[rank][at[rank]]) if at[rank] < len(queues[rank]) else None

    ready = list(programs)
    while ready:
        group = head(ready.pop())
        if group is not None and all(head(member) == group for member in members[group]):
            for member in members[group]:
                at[member] += 1
            ready += members[group]
    waiting = {rank: group for rank in programs if (group := head(rank)) is not None}
    if not waiting:
        return []
    rank = next(iter(waiting))
    path = [-1]
    while rank not in path and rank in waiting:
        path.append(rank)
        rank = next(
            member for member in members[waiting[rank]] if head(member) != waiting[path[-1]]
        )
    pair = sorted((path[-1], rank))
    sides = [_side_at(one, queues[one], at[one]) for one in pair]
    return [Disagreement("deadlock", _name(waiting[path[-1]]), at[path[-1]], *sides)]


@dataclass(frozen=True)
class _Pair:
    """Two members of a group, and their calls in it."""

    group: _Group
    ranks: tuple[int, int]
    ours: Sequence[Collective]
    theirs: Sequence[Collective]

    def misfit(self, i: int, j: int) -> tuple[str, ...]:
        """The names of the fields in which our call i and their call j disagree as calls of one
        collective.
        """
        a = self.ours[i]
        b = self.theirs[j]
        names = _differing(a, b, ("op", "dtype", "device", "reduction"))
        if a.op != b.op or a.op in ROOTED:
            return names
        if not (a.sent and b.sent):
            return names + _differing(a, b, ("bytes",))
        here, there = (self.group[1].index(rank) for rank in self.ranks)
        fits = a.sent[there] == b.received[here] and b.sent[here] == a.received[there]
        return names if fits else (*names, "bytes")

    def alike(self, i: int, j: int) -> bool:
        """Both calls exist, fit and come from one place."""
        if i >= len(self.ours) or j >= len(self.theirs):
            return False
        return self.ours[i].where[:1] == self.theirs[j].where[:1] and not self.misfit(i, j)

    def parting(self) -> int | None:
        """The index of the first call that does not fit; None where all fit.

        Where like calls follow each other, the first difference in size or number comes late. The
        call sites show which call is the one too many.
        """
        count = min(len(self.ours), len(self.theirs))
        end = next((i for i in range(count) if self.misfit(i, i)), count)
        if end == len(self.ours) == len(self.theirs):
            return None
        return next((i for i in range(end) if not self.alike(i, i) and self.skipped(i)), end)

    def skipped(self, at: int) -> bool:
        """One of the two makes a call here that the other does not."""
        ended = at >= min(len(self.ours), len(self.theirs))
        return ended or self.alike(at + 1, at) or self.alike(at, at + 1)

    def explain(self, at: int) -> Disagreement:
        """What happens at the first call that does not fit."""
        if self.alike(at, at + 1) and self.alike(at + 1, at):
            kind = "swapped"
        elif self.skipped(at):
            kind = "missing"
        else:
            kind = ", ".join(self.misfit(at, at))
        calls = zip(self.ranks, (self.ours, self.theirs), strict=True)
        first, second = (_side_at(rank, own, at) for rank, own in calls)
        return Disagreement(kind, _name(self.group), at, first, second)


def _differing(a: Collective, b: Collective, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(a, name) != getattr(b, name))


def _side(rank: int, call: Collective) -> Side:
    peer = {"send": f" to {call.peer}", "recv": f" from {call.peer}"}.get(
        call.op, f" of {call.group}"
    )
    return Side(
        rank, f"calls {call.op}{peer} with {call.bytes:,} bytes of {call.dtype}", call.where
    )


def _side_at(rank: int, calls: Sequence[Collective], at: int) -> Side:
    """Call number ``at``, or that there is none, with the place of the last."""
    if at < len(calls):
        return _side(rank, calls[at])
    if not calls:
        return Side(rank, "makes no such call", ())
    return Side(rank, "makes no further call, the last is", calls[-1].where)


def _group(call: Collective) -> _Group:
    return call.group, call.ranks


def _name(group: _Group) -> str:
    return f"group {group[0]} of ranks {ranges(group[1])}"


def _calls(programs: Programs) -> dict[_Group, dict[int, list[Collective]]]:
    """The calls of each group by rehearsed member, without sends and receives.

    A member without a call in a group that others call is listed too, with no calls.
    """
    calls: dict[_Group, dict[int, list[Collective]]] = {}
    for program in programs.values():
        for call in program:
            if call.op not in POINT_TO_POINT and _group(call) not in calls:
                calls[_group(call)] = {rank: [] for rank in call.ranks if rank in programs}
    for rank, program in programs.items():
        for call in program:
            if call.op not in POINT_TO_POINT:
                calls[_group(call)].setdefault(rank, []).append(call)
    return calls
