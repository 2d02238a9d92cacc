"""New weights to servers over links of a limited rate: time, bytes that leave the trainer, broadcasts."""

from __future__ import annotations

from benchmarks.common import say
from benchmarks.real_size_figure import Figure, NotMeasuredError

MIB = 2**20


def weight_updates(quick: bool) -> list[Figure]:
    """New weights to 1 to 8 servers over limited links: bytes that leave the trainer, time, broadcasts, sources."""
    from benchmarks.weight_links import BUCKETS, RATE, Cost, Update, limited_links, reason_against

    if reason := reason_against():
        raise NotMeasuredError(reason)
    size, repeats = (4.0, 1) if quick else (16.0, 3)
    costs: dict[str, Cost] = {}
    updates = {
        **{f"{count} servers": Update(count, 1, size, repeats=repeats) for count in (1, 2, 4, 8)},
        "8 servers, a group each": Update(8, 1, size, one_group_each=True, repeats=repeats),
        "1 source": Update(2, 1, size, receiver=True, repeats=repeats),
        "PP 2 x EP 2": Update(2, 4, size, receiver=True, repeats=repeats),
    }
    with limited_links(4, 8) as links:
        for name, update in updates.items():
            costs[name] = cost = links.cost_of(update)
            say(f"{name}: {cost.seconds:.2f} s, {cost.sent / MIB:.2f} MiB, {cost.broadcasts:g} broadcasts")
    one, most, before = costs["1 servers"], costs["8 servers"], costs["8 servers, a group each"]
    sent = {f"{name}, MiB": cost.sent / MIB for name, cost in costs.items() if "servers" in name}
    seconds = {f"{name}, s": cost.seconds for name, cost in costs.items()}
    what = f"{size:g} MiB of weights to 8 servers, trainer's link {RATE} Mbit/s"
    return [
        Figure(f"{what}: broadcasts of a bucket", most.broadcasts / BUCKETS, 1, "", {}),
        Figure(f"{what}: bytes leaving the trainer", most.sent / one.sent, 4, "times those to 1", sent,
               before.sent / one.sent),
        Figure(f"{what}: time", most.seconds / before.seconds, 0.65, "of a group per server", seconds, 1.0),
        Figure(f"{what.replace('8', '2')}: time from PP 2 x EP 2 sources", costs["PP 2 x EP 2"].seconds
               / costs["1 source"].seconds, 1 / 1.7, "of one source"),
    ]  # fmt: skip
