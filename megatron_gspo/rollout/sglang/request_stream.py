"""Groups of responses in flight: begun in one call, taken in others as they finish, carried over updates of weights.

What is begun is taken exactly once, or given back by `stop`. All of it lives in the event loop of the requests; the
methods of `Stream` are called from the training thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_gspo.config import SamplingParams
from megatron_gspo.data.sample import Prompt, Sample
from megatron_gspo.rollout.sglang.client import Client
from megatron_gspo.rollout.sglang.partial_response import Draft
from megatron_gspo.rollout.sglang.server_pool import FleetError, Member
from megatron_gspo.servers.http_client import EventLoop

_LOOK = 0.5  # seconds between two looks at the servers while nothing finishes


class WeightsWanted(Exception):
    """No server holds the current weights, and at least one is there to take them: update, then ask again."""


@dataclass
class Group:
    """The drafts of one prompt. ticket: its number in the order of `Stream.start`. done: all are drawn."""

    ticket: int
    prompt: Prompt
    drafts: list[Draft]
    sampling: SamplingParams
    seed: int
    task: asyncio.Task | None = None
    done: bool = False

    @property
    def oldest(self) -> int | None:
        """The oldest version among the tokens of its drafts; None while there is no token."""
        return min((draft.oldest for draft in self.drafts if draft.oldest is not None), default=None)


class Stream:
    """See the module. `decode`: token ids of a response to its text. `recovery`: seconds without any server that
    answers after which `take` gives up."""

    def __init__(self, loop: EventLoop, client: Client, decode: Callable[[list[int]], str], *, recovery: float) -> None:
        self._loop, self._client, self._decode, self._recovery = loop, client, decode, recovery
        self._groups: dict[int, Group] = {}
        self._tickets = 0
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._unserved: float | None = None  # since when no server answers, as seen by `take`, whose caller may go on

    @property
    def prompts(self) -> list[Prompt]:
        """Those of the groups that are begun and not taken, in the order of `start`."""
        return [group.prompt for group in list(self._groups.values())]

    def start(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, seed: int) -> list[int]:
        """Begin `sampling.n_samples_per_prompt` responses to each prompt; returns at once, with each group's ticket.

        Raises ValueError for a prompt that the model can't take: its ids never reach a server.
        """
        check_prompts(prompts, sampling, self._client)
        return self._loop.run(self._start(prompts, sampling, seed))

    def take(self, count: int, *, patience: float | None = None, oldest: int | None = None,
             per_step: int | None = None) -> list[list[Sample]]:
        """`count` finished groups, those begun first before the others; each with its samples in order.

        patience: seconds after which fewer come back (none: []), None waits. oldest: groups with a token of this
        version or an older one are waited for and come first; per_step: groups that each later step takes (None:
        `count`), so that as many as these can't take before they are too old come now (`choose`).

        Raises `WeightsWanted`; `FleetError` where no server answered for `recovery` seconds; `EngineError` for a
        request that failed for good.
        """
        found = self.take_tickets(count, patience=patience, oldest=oldest, per_step=per_step)
        return [samples for _, samples in found]

    def take_tickets(self, count: int, *, patience: float | None = None, oldest: int | None = None,
                     per_step: int | None = None) -> list[tuple[int, list[Sample]]]:
        """As `take`, with the ticket of each group."""
        if count > len(self._groups):
            raise ValueError(f"take({count}): only {len(self._groups)} groups were begun")
        groups = self._loop.run(self._take(count, patience, oldest, per_step or count))
        routes = self._client.model.routes
        return [(group.ticket, [draft.sample(routes, self._decode) for draft in group.drafts]) for group in groups]

    def stop(self, *, keep: bool) -> list[Prompt]:
        """Have the servers stop. keep: what is drawn is kept and goes on after the next update or `take`; else all
        groups that weren't taken, finished or not, are thrown away and their prompts are returned."""
        return self._loop.run(self._stop(keep))

    async def _start(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[int]:
        tickets = []
        for prompt in prompts:
            drafts = [Draft(prompt, i, sampling.max_response_length) for i in range(sampling.n_samples_per_prompt)]
            group = Group(self._tickets, prompt, drafts, sampling, seed)
            self._groups[group.ticket] = group
            group.task = asyncio.ensure_future(self._draw(group))
            tickets.append(group.ticket)
            self._tickets += 1
        return tickets

    async def _draw(self, group: Group) -> None:
        try:
            near: Member | None = None
            if len(group.drafts) > 1:
                near = await self._client.prime(group.prompt.token_ids.tolist())
            draws = (self._client.draw(draft, group.sampling, group.seed, near) for draft in group.drafts)
            await asyncio.gather(*draws)
            group.done = True
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
        self._news.set()

    async def _take(self, count: int, patience: float | None, oldest: int | None, per_step: int) -> list[Group]:
        fleet, end = self._client.fleet, None if patience is None else time.monotonic() + patience
        if fleet.held:
            await fleet.hold(False)
        while True:
            if self._failure is not None:
                raise self._failure
            chosen = choose(list(self._groups.values()), count, oldest, per_step)
            now = time.monotonic()
            if len(chosen) == count or (end is not None and now >= end):
                break
            if fleet.serving:
                self._unserved = None
            elif fleet.stale:
                self._unserved = None
                raise WeightsWanted
            else:
                self._unserved = now if self._unserved is None else self._unserved
                if now - self._unserved > self._recovery:
                    raise FleetError(f"no server has answered for {self._recovery:g} s: {fleet.describe()}")
            await self._wait(_LOOK if end is None else min(_LOOK, end - now))
        if len(chosen) == count:
            self._unserved = None
        for group in chosen:
            del self._groups[group.ticket]
        return chosen

    async def _wait(self, seconds: float) -> None:
        """Until a group is finished, or for so long: the state of the servers is looked at anew then."""
        self._news.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), max(seconds, 0.0))

    async def _stop(self, keep: bool) -> list[Prompt]:
        await self._client.interrupt()
        if keep:
            return []
        dropped = list(self._groups.values())
        tasks = [group.task for group in dropped if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in dropped:
            self._client.counts["discarded_tokens"] += sum(draft.forget() for draft in group.drafts)
        self._groups.clear()
        await self._client.fleet.hold(False)
        return [group.prompt for group in dropped]


def choose(groups: Sequence[Group], count: int, oldest: int | None, per_step: int) -> list[Group]:
    """Finished groups to take, at most `count`; fewer where more must be waited for.

    A group whose oldest token is of version `oldest + k` can be taken k steps from now at the latest. Of those that
    have at most k steps left, all but the `k * per_step` that later steps take have to go now: they come first, and
    places are kept for those of them that aren't finished. The other places go to whoever was begun first.
    """
    finished = [group for group in groups if group.done]
    if oldest is None:
        return finished[:count]
    left = {group.ticket: max(group.oldest - oldest, 0) for group in groups if group.oldest is not None}
    chosen: dict[int, Group] = {}
    kept = 0
    for steps in sorted(set(left.values())):
        within = [group for group in groups if left.get(group.ticket, steps + 1) <= steps]
        missing = max(min(len(within) - steps * per_step, count) - len(chosen) - kept, 0)
        ready = [group for group in within if group.done and group.ticket not in chosen][:missing]
        chosen |= {group.ticket: group for group in ready}
        kept += missing - len(ready)
    others = [group for group in finished if group.ticket not in chosen]
    return [*chosen.values(), *others[: count - kept - len(chosen)]]


def check_prompts(prompts: Sequence[Prompt], sampling: SamplingParams, client: Client) -> None:
    """Raise ValueError for prompts that the model can't take."""
    model = client.model
    for prompt in prompts:
        prompt.check()
        if (largest := int(prompt.token_ids.max())) >= model.vocab_size:
            raise ValueError(f"prompt {prompt.index}: token id {largest} is outside the vocabulary of "
                             f"{model.vocab_size}: use the model's own tokenizer")
        total = prompt.length + sampling.max_response_length
        if model.max_length is not None and total > model.max_length:
            raise ValueError(f"prompt {prompt.index}: {prompt.length} tokens + max_response_length="
                             f"{sampling.max_response_length} exceed the {model.max_length} positions of the model")
