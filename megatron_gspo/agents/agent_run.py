"""One run of an agent: its calls from the request to the delivered reply, its reward, its end.

    prepare -> begin -> reply -> deliver, or abandon if the client has gone meanwhile

A draw goes on when its client has gone, so that time-outs of clients do not prefer short replies:
an equal call adopts it. Everything here runs in one event loop, rendering and parsing too: what a
call adds to its prompt is rendered in less time than the way to a thread and back takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import numbers
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_gspo.agents.conversation import (
    Call,
    CallError,
    Message,
    Reply,
    ToolCall,
    call_id,
    invalid_request,
    over_limit,
)
from megatron_gspo.agents.generation import CallLimits, Generation, Generator, cut_at_stop
from megatron_gspo.agents.rendering import Rendering
from megatron_gspo.agents.reply_parsing import ParsedReply
from megatron_gspo.agents.run_clock import RunClock
from megatron_gspo.agents.session_tree import BreakCause, Node, SessionTree
from megatron_gspo.errors import EngineError, first_line


@dataclass(frozen=True)
class RunLimits:
    """max_calls: draws of a run. max_call_length: tokens of a reply. max_context: tokens of a
    branch, reply included. max_run_tokens: tokens of all rows of a run."""

    max_calls: int = 100
    max_call_length: int = 4096
    max_context: int = 32768
    max_run_tokens: int = 131072


class Consumer(Protocol):
    """The client that waits for a reply."""

    @property
    def gone(self) -> bool:
        """Whether its connection is closed."""
        ...


class _LocalConsumer:
    """A client in this process."""

    gone = False


@dataclass(frozen=True)
class PreparedCall:
    """A call with its prompt. messages: of the whole history. break_cause: why the prompt does not
    continue the tokens of an earlier call; None if it does, or nothing is there to continue."""

    call: Call
    messages: tuple[Message, ...]
    prompt: np.ndarray
    break_cause: BreakCause | None

    @property
    def is_trained(self) -> bool:
        """Whether the reply is of the policy that is trained."""
        return self.call.model == "policy"


@dataclass(eq=False)
class Draw:
    """A reply on its way to `consumer`, which has sent `prepared`."""

    node: Node
    prepared: PreparedCall
    seed: int
    task: asyncio.Task[Generation]
    consumer: Consumer


class AgentRun:
    """See the module.

    number, key: by which its requests are known. session_id: by which runners name it, who have one
    key for all of their runs. seed: of the run, from (seed, prompt, sample). reward: as the agent
    has posted it, None before. response_rewards: by reply id. failure: why a reply could not be
    drawn, None if all could. over: is set when no call is accepted any more.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        limits: RunLimits,
        rendering: Rendering,
        generator: Generator,
        *,
        takes_rewards: bool = True,
    ) -> None:
        """takes_rewards: whether the agent scores itself."""
        self.number = number
        self.key = secrets.token_hex(16)
        self.session_id = secrets.token_hex(8)
        self.seed = seed
        self.tree = SessionTree()
        self.reward: float | None = None
        self.response_rewards: dict[str, float] = {}
        self.failure: BaseException | None = None
        self.over = asyncio.Event()
        self._takes_rewards = takes_rewards
        self._limits = limits
        self._rendering = rendering
        self._generator = generator
        self._draws: dict[Node, Draw] = {}
        self._replies: dict[str, Node] = {}
        self._last_draws: list[Draw] = []  # delivered, and not continued
        self._last_sign = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether no call is accepted any more."""
        return self.over.is_set()

    @property
    def oldest_version(self) -> int | None:
        """See `OpenRun`."""
        return self.tree.oldest_version

    @property
    def num_tokens(self) -> int:
        """See `OpenRun`."""
        return self.tree.delivered_tokens

    @property
    def silence(self) -> float:
        """Seconds since the agent's last request; 0 while it waits for a reply."""
        if any(
            draw.node.state == "waiting" and not draw.consumer.gone for draw in self._draws.values()
        ):
            return 0.0
        return time.monotonic() - self._last_sign

    def touch(self) -> None:
        """The agent has sent a request, or got its reply."""
        self._last_sign = time.monotonic()

    def clock(self) -> RunClock:
        """A clock that stands still while the calls of this run are paused."""
        return RunClock(lambda: self._generator.paused_seconds)

    def prepare(self, call: Call) -> PreparedCall:
        """The prompt of a call. Raises CallError for messages that can't be rendered."""
        messages = self._history(call)
        known = self.tree.find(messages)
        try:
            if known is None:
                prompt = self._rendering.render(messages, call.tools)
                return PreparedCall(call, messages, prompt, self._new_branch_cause(messages))
            new = messages[len(known.messages) :]
            messages = (*known.messages, *new)  # with the texts as they were given
            prompt, cause = self._continue(known, messages, new, call)
        except UnicodeError:
            raise invalid_request("the messages have half of a surrogate pair") from None
        return PreparedCall(call, messages, prompt, cause)

    def begin(
        self, prepared: PreparedCall, consumer: Consumer, *, is_repeated: bool = False
    ) -> Draw:
        """Start the draw of a reply, or adopt an equal one whose client has gone.

        is_repeated: the client says that it has sent the call before. It then gets a reply again
        that was written to a connection which it had just closed.

        Raises CallError if the run has ended or a limit is reached.
        """
        if self.ended:
            raise session_over()
        for draw in self._draws.values():
            if draw.node.state == "waiting" and draw.consumer.gone:
                self.tree.abandon(draw.node)
        wanted = self._wanted(prepared)
        earlier = self._lost_draw(prepared, wanted) if is_repeated else None
        if earlier is None:
            earlier = self._adopted_draw(prepared, wanted)
        if earlier is None:
            return self._new_draw(prepared, wanted, consumer)
        earlier.prepared = prepared
        earlier.consumer = consumer
        return earlier

    async def reply(self, draw: Draw, consumer: Consumer) -> Reply | None:
        """The reply of a draw; None if another client has adopted it.

        Raises CallError if the run ends meanwhile (401) or no engine can serve it (503).
        """
        await asyncio.wait({draw.task})
        if self.ended or draw.task.cancelled():
            raise session_over()
        if draw.consumer is not consumer:
            return None
        failure = draw.task.exception()
        self.failure = self.failure or failure
        if isinstance(failure, EngineError):
            self._forget(draw)
            raise CallError(503, "server_error", f"no engine: {first_line(failure)}")
        if failure is not None:
            self._forget(draw)
            raise failure
        generation = draw.task.result()
        prompt = draw.prepared.prompt
        call = draw.prepared.call
        parsed = self._rendering.parse(
            prompt, generation.tokens, call.tools, calls_tools=call.calls_tools
        )
        texts: list[str] = []
        if call.log_probs:
            texts = [self._rendering.text(token) for token in generation.tokens[:, None]]
        return _reply(draw, generation, parsed, texts)

    def deliver(self, draw: Draw, consumer: Consumer, reply: Reply) -> None:
        """The client has the whole reply: from now on it is a part of the run."""
        if self.ended or draw.consumer is not consumer or draw.node.state != "waiting":
            return
        self.touch()
        prepared = draw.prepared
        self.tree.deliver(
            draw.node,
            draw.task.result(),
            messages=(*prepared.messages, reply.message),
            tools=prepared.call.tools,
        )
        self.tree.counts["malformed_calls"] += reply.malformed_calls
        self._replies[reply.id] = draw.node
        del self._draws[draw.node]
        self._last_draws = [other for other in self._last_draws if not other.node.children]
        if draw.node.trained:
            self._last_draws.append(draw)

    def abandon(self, draw: Draw, consumer: Consumer) -> None:
        """The client has gone before it had the whole reply."""
        if draw.consumer is consumer and draw.node.state == "waiting" and draw.node in self._draws:
            self.tree.abandon(draw.node)

    async def ask(self, call: Call) -> Reply:
        """The delivered reply to a client in this process.

        Raises what `prepare`, `begin` and `reply` raise.
        """
        consumer = _LocalConsumer()
        draw = self.begin(self.prepare(call), consumer)
        reply = await self.reply(draw, consumer)
        assert reply is not None, "no other client adopts the draw"
        self.deliver(draw, consumer, reply)
        return reply

    def set_reward(self, value: Any, reply_id: str = "") -> None:
        """Take the reward of the run, or of one reply. An equal repetition is accepted.

        Raises CallError 400 for another value than before, for one that is not a finite number,
        for a reply that was not delivered, and where a verifier scores the run.
        """
        if not self._takes_rewards:
            raise invalid_request("data.verifier scores the run; the agent's reward is not taken")
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Real)
            or not math.isfinite(value)
        ):
            raise invalid_request("reward must be a finite number")
        if reply_id and reply_id not in self._replies:
            raise invalid_request("response_id is not that of a delivered reply")
        reward = float(value)
        before = self.response_rewards.get(reply_id) if reply_id else self.reward
        if before is not None and before != reward:
            raise invalid_request(f"the reward is {before:g} already; it can't be changed")
        if reply_id:
            self.response_rewards[reply_id] = reward
        else:
            self.reward = reward

    def end(self) -> None:
        """Accept no call any more, and stop those in flight. May be called again."""
        self.over.set()
        for draw in self._draws.values():
            draw.task.cancel()

    async def _generate(
        self, prompt: np.ndarray, limits: CallLimits, seed: int, known: int
    ) -> Generation:
        """known: tokens of the parent, whose routes but the last one are known."""
        generation = await self._generator.generate(
            prompt, limits, seed=seed, routes_start=max(known - 1, 0)
        )
        return cut_at_stop(generation, limits.stop, self._rendering.text)

    @property
    def turn_rewards(self) -> dict[int, float]:
        """The rewards of single replies, by the index of their call."""
        return {
            self._replies[reply_id].index: reward
            for reply_id, reward in self.response_rewards.items()
        }

    def _history(self, call: Call) -> tuple[Message, ...]:
        """The messages of a call behind those of the reply that it continues."""
        if not call.previous_reply_id:
            return call.messages
        previous = self._replies.get(call.previous_reply_id)
        if previous is None:
            raise invalid_request("previous_response_id is not that of a delivered reply")
        has_instructions = bool(call.messages) and call.messages[0].role == "system"
        head = call.messages[:1] if has_instructions else ()
        earlier = previous.messages
        if earlier[0].role == "system":
            earlier = earlier[1:]  # instructions belong to one call
        return (*head, *earlier, *call.messages[len(head) :])

    def _continue(
        self, known: Node, messages: tuple[Message, ...], new: tuple[Message, ...], call: Call
    ) -> tuple[np.ndarray, BreakCause | None]:
        """The prompt behind the tokens of `known`, or a new one and why."""
        tokens = known.tokens
        extended: np.ndarray | BreakCause = "tools"
        if known.tools == call.tools:
            reply_start = len(tokens) - len(known.reply.tokens)
            extended = self._rendering.extend(
                tokens[:reply_start], tokens[reply_start:], known.messages, new, call.tools
            )
        cause: BreakCause | None = None
        if isinstance(extended, np.ndarray):
            prompt = extended
        else:
            prompt = self._rendering.render(messages, call.tools)
            if not np.array_equal(prompt[: len(tokens)], tokens):
                cause = extended
        if cause != "tools" and any(message.role == "assistant" for message in new):
            cause = "history"
        return prompt, cause

    def _lost_draw(self, prepared: PreparedCall, wanted: CallLimits) -> Draw | None:
        """The last delivered draw of an equal call that nothing continues and whose connection is
        closed."""
        if not prepared.is_trained:
            return None
        for draw in reversed(self._last_draws):
            if (
                draw.consumer.gone
                and draw.node.wanted == wanted
                and not draw.node.children
                and np.array_equal(draw.prepared.prompt, prepared.prompt)
            ):
                return draw
        return None

    def _adopted_draw(self, prepared: PreparedCall, wanted: CallLimits) -> Draw | None:
        """The draw of an equal call whose client has gone; see `begin`."""
        prompt = prepared.prompt
        node = self.tree.adoptable(prompt, wanted, trained=prepared.is_trained)
        if node is None:
            return None
        if prepared.is_trained:
            self._check_room(
                self._room(prompt, self.tree.parent_of(prompt)), node.limits.max_tokens
            )
        self.tree.adopt(node)
        return self._draws[node]

    def _new_draw(self, prepared: PreparedCall, wanted: CallLimits, consumer: Consumer) -> Draw:
        prompt = prepared.prompt
        parent = self.tree.parent_of(prompt)
        max_tokens = wanted.max_tokens
        if prepared.is_trained:
            room = self._room(prompt, parent)
            self._check_room(room, 1)
            max_tokens = min(max_tokens, room)
        if self.tree.num_calls >= self._limits.max_calls:
            raise over_limit(f"the run has made {self._limits.max_calls} calls (max_calls)")
        node = self.tree.begin(prompt, wanted, max_tokens=max_tokens, trained=prepared.is_trained)
        if node.occurrence == 0 and prepared.break_cause is not None:
            self.tree.count_break(prepared.break_cause)
        known = 0 if parent is None else parent.length
        seed = self._seed_of(node)
        task = asyncio.ensure_future(self._generate(prompt, node.limits, seed, known))
        task.add_done_callback(_retrieve_exception)
        draw = Draw(node, prepared, seed, task, consumer)
        self._draws[node] = draw
        return draw

    def _room(self, prompt: np.ndarray, parent: Node | None) -> int:
        """Tokens that the reply to a prompt may have, so that the rows fit `max_run_tokens`."""
        growth = self.tree.growth(prompt, parent)
        return self._limits.max_run_tokens - self.tree.num_tokens() - growth

    def _check_room(self, room: int, needed: int) -> None:
        if room < needed:
            most = self._limits.max_run_tokens
            raise over_limit(f"the calls of this run have {most} tokens (max_run_tokens)")

    def _new_branch_cause(self, messages: tuple[Message, ...]) -> BreakCause | None:
        if not self.tree.delivered:
            return None
        if any(message.role == "assistant" for message in messages):
            return "history"
        return "new_thread"

    def _wanted(self, prepared: PreparedCall) -> CallLimits:
        """Limits that depend on the request alone, so that its repetition has the same."""
        length = len(prepared.prompt)
        room = self._limits.max_context - length
        if room < 1:
            raise over_limit(
                f"{self._limits.max_context} tokens (max_context); the messages have {length}"
            )
        longest = min(self._limits.max_call_length, room)
        if prepared.call.max_tokens is not None:
            longest = min(longest, prepared.call.max_tokens)
        return CallLimits(longest, prepared.call.stop)

    def _seed_of(self, node: Node) -> int:
        """62 bits that do not depend on the order in which calls arrive."""
        numbers_of_call = np.array([self.seed, node.occurrence], dtype=np.int64).tobytes()
        digest = hashlib.blake2b(numbers_of_call + node.prompt_digest, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def _forget(self, draw: Draw) -> None:
        if draw.node in self._draws:
            self.tree.discard(draw.node)
            del self._draws[draw.node]


def session_over() -> CallError:
    """401: a client does not try this again, and an agent stops."""
    return CallError(
        401, "session_over", "the key is not that of an open run; its run may have ended"
    )


def _retrieve_exception(task: asyncio.Task[Generation]) -> None:
    """A draw may fail when no client waits for it any more."""
    if not task.cancelled():
        task.exception()


def _reply(
    draw: Draw, generation: Generation, parsed: ParsedReply, token_texts: list[str]
) -> Reply:
    identity = draw.seed.to_bytes(8, "little")
    reply_id = hashlib.blake2b(identity, digest_size=12).hexdigest()
    message = Message(
        "assistant",
        parsed.content,
        parsed.reasoning,
        tuple(
            ToolCall(call_id(reply_id, position), call.name, call.arguments)
            for position, call in enumerate(parsed.tool_calls)
        ),
        reply_id=reply_id,
    )
    stop_string = None
    if generation.finish_reason == "stop":
        message, stop_string = _trimmed(message, draw.node.wanted.stop)
    return Reply(
        id=reply_id,
        message=message,
        finish_reason=generation.finish_reason,
        stop_string=stop_string,
        prompt=draw.prepared.prompt,
        tokens=generation.tokens,
        log_probs=generation.log_probs,
        created=int(time.time()),
        token_texts=tuple(token_texts),
        malformed_calls=parsed.malformed,
    )


def _trimmed(message: Message, stop: tuple[str, ...]) -> tuple[Message, str | None]:
    """A reply up to the first of its stop strings, and that string."""
    positions = [(message.content.find(text), text) for text in stop if text in message.content]
    if not positions:
        return message, None
    position, text = min(positions)
    return replace(message, content=message.content[:position]), text
