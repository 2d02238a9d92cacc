"""The calls of one run as a tree of token ids, and the rows that are trained on.

A call is a node: its prompt and its reply. Its parent is the delivered call whose prompt and reply
are the longest prefix of its prompt, token by token. An agent that only appends to its history
makes a chain; one that edits it, asks twice or works with several histories makes branches. A reply
of the frozen model is a part of later prompts and the parent of none.

A reply counts from the moment of its delivery. One whose client has gone is abandoned: an equal
call adopts it, and without one it is never trained.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

import numpy as np

from megatron_gspo.agents.conversation import Message, Tool
from megatron_gspo.agents.generation import CallLimits, Generation

State = Literal["waiting", "abandoned", "delivered"]
BreakCause = Literal["tools", "thinking", "rendering", "history", "new_thread"]
"""Why a call does not continue a node although there are some: the tools have changed, the template
drops earlier reasoning, the renderer can't append to the tokens, the history has replies that the
endpoint has not given, or it has none at all (a sub-agent, a summary)."""

_NO_TOKENS = np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Node:
    """A call.

    prompt_digest: 16 bytes that depend on the prompt's tokens alone. wanted: limits of the request;
    those of the draw may be tighter. occurrence: number of earlier draws from the same prompt in
    this run. trained: whether its reply is the policy's.

    Set by delivery: `index` in the order of deliveries; `parent`; `segment` [c + r] int64, the
    prompt's tokens after the parent's sequence and the reply; `generation`, whose routes are
    those of the positions from the parent's last token on; `messages`, those of the request and the
    reply; `tools` of the request.
    """

    prompt: np.ndarray
    prompt_digest: bytes
    wanted: CallLimits
    limits: CallLimits
    occurrence: int
    trained: bool = True
    state: State = "waiting"
    adopted: bool = False
    index: int = -1
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    segment: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    generation: Generation | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    length: int = 0

    @property
    def reply(self) -> Generation:
        """The delivered reply."""
        assert self.generation is not None, "the call has no reply yet"
        return self.generation

    @property
    def chain(self) -> list[Node]:
        """The nodes from the root to this one, whose segments are its tokens."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def tokens(self) -> np.ndarray:
        """[length] int64: prompt and reply."""
        return np.concatenate([node.segment for node in self.chain])


@dataclass(frozen=True)
class Turn:
    """A reply that is trained in a row: response tokens start .. end - 1, and the node's index."""

    start: int
    end: int
    index: int


@dataclass(frozen=True)
class Row:
    """A chain of calls: P prompt tokens before the first reply, R response tokens, L = P + R.

    The arrays are those of a `Sample`: tokens [L] int64, loss_mask [R] bool, log_probs [R] float32
    (0 where a prompt continues), versions [R] int32, routes [L-1, layers, k], missing_routes [L-1].
    turns: the replies that are trained in this row, in order.
    """

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    log_probs: np.ndarray | None
    versions: np.ndarray
    routes: np.ndarray | None
    missing_routes: np.ndarray | None
    finish_reason: str
    turns: tuple[Turn, ...]


class SessionTree:
    """See the module.

    counts: events, by the names of the metrics. oldest_version: the oldest weight version among
    the trained tokens, None without any. delivered_tokens: of all delivered replies.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.oldest_version: int | None = None
        self.delivered_tokens = 0
        self._delivered: list[Node] = []
        self._roots: list[Node] = []
        self._open: list[Node] = []
        self._occurrences: Counter[bytes] = Counter()

    @property
    def delivered(self) -> Sequence[Node]:
        """Delivered calls, in their order."""
        return self._delivered

    @property
    def num_calls(self) -> int:
        """Draws so far; an adopted one counts once."""
        return self._occurrences.total()

    @property
    def undelivered(self) -> int:
        """Calls that were begun and have not been delivered."""
        return len(self._open)

    def find(self, messages: Sequence[Message]) -> Node | None:
        """The delivered call whose messages, reply included, are the longest beginning of
        `messages`; None if there is none.

        Among equal ones it is that whose ids the messages repeat, then the last one.
        """
        longest_first = sorted(self._delivered, key=lambda node: -len(node.messages))
        for _, nodes in groupby(longest_first, key=lambda node: len(node.messages)):
            matches = [node for node in nodes if _begins(node, messages)]
            if matches:
                return max(matches, key=lambda node: (_common_ids(node, messages), node.index))
        return None

    def parent_of(self, prompt: np.ndarray) -> Node | None:
        """The delivered call of the policy whose tokens are the longest prefix of `prompt`; None if
        there is none. Among equal ones it is the first that none continues, or else the first."""
        prefixes: list[Node] = []
        candidates = [(root, 0) for root in self._roots]
        while candidates:
            node, offset = candidates.pop()
            if _is_prefix(node.segment, prompt[offset:]):
                prefixes.append(node)
                candidates += [(child, node.length) for child in node.children]
        return max(prefixes, key=_rank, default=None)

    def growth(self, prompt: np.ndarray, parent: Node | None) -> int:
        """Tokens by which the rows grow if a call of the policy has this prompt, without its reply.

        parent: see `parent_of`. Waiting calls count as delivered, so that calls at the same time
        fit together.
        """
        return _growth(prompt, parent, [self.parent_of(node.prompt) for node in self._waiting()])

    def num_tokens(self) -> int:
        """Tokens of all rows when the waiting calls are delivered, at most."""
        count = sum(leaf.length for leaf in self._leaves())
        parents: list[Node | None] = []
        for node in self._waiting():
            parent = self.parent_of(node.prompt)
            count += _growth(node.prompt, parent, parents) + node.limits.max_tokens
            parents.append(parent)
        return count

    def adoptable(self, prompt: np.ndarray, wanted: CallLimits, *, trained: bool) -> Node | None:
        """The first abandoned call with this prompt and these limits of the request."""
        for node in self._open:
            if (
                node.state == "abandoned"
                and node.trained == trained
                and node.wanted == wanted
                and np.array_equal(node.prompt, prompt)
            ):
                return node
        return None

    def begin(
        self,
        prompt: np.ndarray,
        wanted: CallLimits,
        *,
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Node:
        """A new waiting call. prompt: [P] int64. max_tokens: a tighter limit of this draw."""
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        limits = wanted if max_tokens is None else replace(wanted, max_tokens=max_tokens)
        node = Node(prompt, digest, wanted, limits, self._occurrences[digest], trained)
        self._occurrences[digest] += 1
        self._open.append(node)
        return node

    def adopt(self, node: Node) -> None:
        """Let an equal call wait for an abandoned one's reply."""
        assert node.state == "abandoned", "only an abandoned call can be adopted"
        node.state = "waiting"
        if not node.adopted:
            self.counts["adopted"] += 1
        node.adopted = True

    def abandon(self, node: Node) -> None:
        """The client has gone."""
        assert node.state == "waiting", "only a waiting call can be abandoned"
        node.state = "abandoned"

    def discard(self, node: Node) -> None:
        """Forget a call that got no reply."""
        self._open.remove(node)

    def deliver(
        self,
        node: Node,
        generation: Generation,
        *,
        messages: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
    ) -> None:
        """The client has the whole reply. messages: of the request and the reply."""
        assert node.state == "waiting", "only a waiting call can be delivered"
        parent = self.parent_of(node.prompt)
        known = 0 if parent is None else parent.length
        self._open.remove(node)
        node.state = "delivered"
        node.index = len(self._delivered)
        node.parent = parent
        node.segment = np.concatenate([node.prompt[known:], generation.tokens])
        node.length = known + len(node.segment)
        node.prompt = _NO_TOKENS  # the chain has them
        node.generation = _from_position(generation, node.length - 1 - max(known - 1, 0))
        node.messages = messages
        node.tools = tools
        if node.trained:
            versions = generation.versions.tolist()
            known_versions = [] if self.oldest_version is None else [self.oldest_version]
            self.oldest_version = min([*known_versions, *versions], default=None)
            (self._roots if parent is None else parent.children).append(node)
        self._delivered.append(node)
        self.delivered_tokens += len(generation.tokens)
        self.counts["calls"] += 1

    def count_break(self, cause: BreakCause) -> None:
        """A call that does not continue the tokens of an earlier one."""
        self.counts[f"breaks/{cause}"] += 1

    def rows(self) -> list[Row]:
        """The rows of the run: the chain of each reply that none continues, in the order of
        deliveries.

        A reply is trained in the first row that has it and is context in the others.
        """
        trained: set[Node] = set()
        chains = []
        for leaf in self._leaves():
            chains.append(_row(leaf.chain, trained))
            trained.update(leaf.chain)
        return chains

    def _leaves(self) -> Iterator[Node]:
        return (node for node in self._delivered if node.trained and not node.children)

    def _waiting(self) -> Iterator[Node]:
        return (node for node in self._open if node.state == "waiting" and node.trained)


def _begins(node: Node, messages: Sequence[Message]) -> bool:
    return len(node.messages) <= len(messages) and all(
        sent.repeats(known, node.limits.stop)
        for sent, known in zip(messages, node.messages, strict=False)
    )


def _common_ids(node: Node, messages: Sequence[Message]) -> int:
    return sum(
        sent.reply_id == known.reply_id != ""
        for sent, known in zip(messages, node.messages, strict=False)
    )


def _rank(node: Node) -> tuple[int, bool, int]:
    """Largest for the node that a prompt continues."""
    return node.length, not node.children, -node.index


def _growth(prompt: np.ndarray, parent: Node | None, parents: Sequence[Node | None]) -> int:
    """parents: of calls that come before."""
    if parent is None or parent.children or parent in parents:
        return len(prompt)
    return len(prompt) - parent.length


def _is_prefix(segment: np.ndarray, tokens: np.ndarray) -> bool:
    # `array_equal` takes more than twice as long for a reply of some hundred tokens.
    return len(segment) <= len(tokens) and bool((segment == tokens[: len(segment)]).all())


def _from_position(generation: Generation, count: int) -> Generation:
    """A generation with the routes of its last `count` input positions."""
    routes = generation.routes
    if routes is None:
        return generation
    missing = generation.missing_routes
    first = len(routes) - count
    return replace(
        generation,
        routes=routes[first:],
        missing_routes=None if missing is None else missing[first:],
    )


def _row(chain: Sequence[Node], already_trained: set[Node]) -> Row:
    root = chain[0]
    prompt_length = len(root.segment) - len(root.reply.tokens)
    response_length = chain[-1].length - prompt_length
    loss_mask = np.zeros(response_length, dtype=bool)
    log_probs = np.zeros(response_length, dtype=np.float32)
    versions = np.zeros(response_length, dtype=np.int32)
    turns = []
    end = 0
    for node in chain:
        reply = node.reply
        start = node.length - len(reply.tokens) - prompt_length
        versions[end:start] = versions[end - 1] if end else 0
        end = start + len(reply.tokens)
        versions[start:end] = reply.versions
        if reply.log_probs is not None:
            log_probs[start:end] = reply.log_probs
        if node not in already_trained:
            loss_mask[start:end] = True
            turns.append(Turn(start, end, node.index))
    routes, missing = _joined_routes([node.reply for node in chain])
    return Row(
        tokens=chain[-1].tokens,
        prompt_length=prompt_length,
        loss_mask=loss_mask,
        log_probs=None if any(node.reply.log_probs is None for node in chain) else log_probs,
        versions=versions,
        routes=routes,
        missing_routes=missing,
        finish_reason=chain[-1].reply.finish_reason,
        turns=tuple(turns),
    )


def _joined_routes(replies: Sequence[Generation]) -> tuple[np.ndarray | None, np.ndarray | None]:
    routes = [reply.routes for reply in replies if reply.routes is not None]
    if len(routes) < len(replies):
        return None, None
    missing = [
        np.zeros(len(known), dtype=bool) if reply.missing_routes is None else reply.missing_routes
        for reply, known in zip(replies, routes, strict=True)
    ]
    joined = np.concatenate(missing)
    return np.concatenate(routes), joined if joined.any() else None
