"""The tree of a run against a naive model that keeps whole token lists."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gspo.agents.conversation import Message, Tool, ToolCall
from megatron_gspo.agents.generation import CallLimits, Generation
from megatron_gspo.agents.session_tree import Node, Row, SessionTree


def generation(tokens, *, version=0, routes=None) -> Generation:
    return Generation(
        np.array(tokens, np.int64),
        -np.array(tokens, np.float32) / 100,
        np.full(len(tokens), version, np.int32),
        "stop",
        routes,
    )


def serve(tree: SessionTree, prompt, reply, *, trained=True, messages=(), **fields) -> Node:
    """A call from its request to its delivery."""
    node = tree.begin(np.array(prompt, np.int64), CallLimits(len(reply)), trained=trained)
    tree.deliver(node, generation(reply, **fields), messages=tuple(messages))
    return node


def trained_tokens(row: Row) -> list[int]:
    return row.tokens[row.prompt_length :][row.loss_mask].tolist()


def test_a_linear_run_is_one_row() -> None:
    tree = SessionTree()
    history = [1, 2]
    for turn in range(20):
        reply = [10 + turn, 50]
        serve(tree, history, reply)
        history = [*history, *reply, 3]
    (row,) = tree.rows()
    assert row.tokens.tolist() == history[:-1]
    assert row.prompt_length == 2
    assert trained_tokens(row) == [token for turn in range(20) for token in (10 + turn, 50)]
    assert [turn.index for turn in row.turns] == list(range(20))
    assert tree.num_tokens() == len(row.tokens)


def test_a_shared_reply_is_trained_in_the_first_row_alone() -> None:
    tree = SessionTree()
    serve(tree, [1], [2])
    serve(tree, [1, 2, 3], [4])
    serve(tree, [1, 2, 5], [6])
    first, second = tree.rows()
    assert (first.tokens.tolist(), trained_tokens(first)) == ([1, 2, 3, 4], [2, 4])
    assert (second.tokens.tolist(), trained_tokens(second)) == ([1, 2, 5, 6], [6])
    assert second.log_probs is not None
    assert second.log_probs.tolist() == pytest.approx([-0.02, 0, -0.06])


def test_an_equal_request_after_delivery_is_another_draw() -> None:
    tree = SessionTree()
    first = serve(tree, [1], [2])
    second = serve(tree, [1], [3])
    assert (first.occurrence, second.occurrence) == (0, 1)
    assert [trained_tokens(row) for row in tree.rows()] == [[2], [3]]


def test_equal_draws_make_lines_of_their_own() -> None:
    tree = SessionTree()
    for _ in range(2):
        serve(tree, [1], [2])
        serve(tree, [1, 2, 3], [4])
    assert [trained_tokens(row) for row in tree.rows()] == [[2, 4], [2, 4]]


def test_calls_that_wait_fit_together_whichever_is_delivered_first() -> None:
    tree = SessionTree()
    serve(tree, [0], [0])
    prompts = [np.array([0, 0, last], np.int64) for last in (1, 2)]
    first = tree.begin(prompts[0], CallLimits(1))
    second = tree.begin(prompts[1], CallLimits(1))
    assert tree.num_tokens() == 8
    tree.deliver(second, generation([5]), messages=())
    assert tree.num_tokens() == 8
    tree.deliver(first, generation([5]), messages=())
    assert tree.num_tokens() == sum(len(row.tokens) for row in tree.rows()) == 8


def test_an_abandoned_reply_is_not_trained_unless_it_is_adopted() -> None:
    tree = SessionTree()
    prompt = np.array([1], np.int64)
    limits = CallLimits(4)
    node = tree.begin(prompt, limits)
    tree.abandon(node)
    assert tree.rows() == []
    assert tree.adoptable(prompt, CallLimits(5), trained=True) is None
    assert tree.adoptable(np.array([2], np.int64), limits, trained=True) is None
    assert tree.adoptable(prompt, limits, trained=False) is None
    assert tree.adoptable(prompt, limits, trained=True) is node
    tree.adopt(node)
    assert tree.adoptable(prompt, limits, trained=True) is None
    tree.deliver(node, generation([7]), messages=())
    assert [trained_tokens(row) for row in tree.rows()] == [[7]]
    assert (tree.counts["adopted"], tree.num_calls, tree.undelivered) == (1, 1, 0)


def test_frozen_replies_are_context() -> None:
    tree = SessionTree()
    frozen = serve(tree, [1], [2], trained=False)
    assert tree.rows() == []
    serve(tree, [1, 2, 3], [4])
    (row,) = tree.rows()
    assert (row.tokens.tolist(), row.prompt_length, trained_tokens(row)) == ([1, 2, 3, 4], 3, [4])
    last = serve(tree, [1, 2, 3, 4, 5], [6], trained=False)
    assert [row.tokens.tolist() for row in tree.rows()] == [[1, 2, 3, 4]]
    assert frozen.tokens.tolist() == [1, 2]
    assert last.tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_versions_of_context_are_those_of_the_reply_before() -> None:
    tree = SessionTree()
    serve(tree, [1], [2, 3], version=4)
    serve(tree, [1, 2, 3, 8, 9], [5], version=6)
    (row,) = tree.rows()
    assert row.versions.tolist() == [4, 4, 4, 4, 6]
    assert tree.oldest_version == 4


def routes_of(tokens, start: int) -> np.ndarray:
    """[L - 1 - start, 1, 1]: the routes of the input positions from `start` on."""
    return np.array(tokens[start:-1], np.uint8)[:, None, None]


def test_routes_are_those_of_the_call_that_fed_a_token_first() -> None:
    tree = SessionTree()
    serve(tree, [1, 2], [3], routes=routes_of([1, 2, 3], 0))
    serve(tree, [1, 2, 3, 4], [5], routes=routes_of([1, 2, 3, 4, 5], 2))
    # This call was begun before the first one was delivered.
    serve(tree, [1, 2, 3, 6], [7], routes=routes_of([1, 2, 3, 6, 7], 0))
    for row in tree.rows():
        assert row.routes is not None
        assert row.routes[:, 0, 0].tolist() == row.tokens[:-1].tolist()


def test_one_call_without_routes_leaves_its_rows_without_them() -> None:
    tree = SessionTree()
    serve(tree, [1], [2], routes=routes_of([1, 2], 0))
    serve(tree, [1, 2, 3], [4])
    (row,) = tree.rows()
    assert row.routes is None


@dataclass
class NaiveCall:
    prompt: list[int]
    reply: list[int]
    trained: bool
    delivered: bool = False
    parent: int | None = None
    order: int = -1


@dataclass
class NaiveRun:
    """Each call with whole lists; parents and rows by comparing all pairs."""

    calls: list[NaiveCall] = field(default_factory=list)
    delivered: list[NaiveCall] = field(default_factory=list)

    def deliver(self, call: NaiveCall) -> None:
        candidates = [
            earlier
            for earlier in self.delivered
            if earlier.trained
            and call.prompt[: len(earlier.prompt + earlier.reply)] == earlier.prompt + earlier.reply
        ]
        if candidates:
            continued = [other.parent for other in self.delivered if other.trained]
            longest = max(len(earlier.prompt + earlier.reply) for earlier in candidates)
            call.parent = min(
                (earlier.order in continued, earlier.order)
                for earlier in candidates
                if len(earlier.prompt + earlier.reply) == longest
            )[1]
        call.order = len(self.delivered)
        self.delivered.append(call)

    def chain(self, call: NaiveCall) -> list[NaiveCall]:
        before = [] if call.parent is None else self.chain(self.delivered[call.parent])
        return [*before, call]

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(tokens, positions of trained tokens) of each row."""
        chains = [self.chain(call) for call in self.delivered if call.trained]
        last = [chain for chain in chains if not any(chain[-1] in other[:-1] for other in chains)]
        seen: list[int] = []
        rows = []
        for chain in last:
            positions = []
            for call in chain:
                if call.order not in seen:
                    start = len(call.prompt)
                    positions += range(start, start + len(call.reply))
                seen.append(call.order)
            rows.append((chain[-1].prompt + chain[-1].reply, positions))
        return rows


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[str, int, list[int], list[int], bool]]:
    """Steps (what, which earlier call, new context, reply, trained) of a run with few tokens, so
    that prefixes are common."""
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=2)
    step = st.tuples(
        st.sampled_from(["serve", "serve", "begin", "abandon", "deliver", "adopt"]),
        st.integers(0, 30),
        tokens,
        tokens,
        st.integers(0, 4).map(bool),
    )
    return draw(st.lists(step, max_size=12))


@settings(max_examples=250, deadline=None)
@given(scripts())
def test_the_tree_is_the_naive_model(steps) -> None:
    tree = SessionTree()
    naive = NaiveRun()
    waiting: list[tuple[Node, NaiveCall]] = []
    abandoned: list[tuple[Node, NaiveCall]] = []
    for what, choice, context, reply, trained in steps:
        if what in ("serve", "begin"):
            earlier = naive.delivered[choice % len(naive.delivered)] if naive.delivered else None
            before = earlier.prompt + earlier.reply if earlier and choice % 5 else []
            call = NaiveCall(before + context, reply, trained)
            size_before = tree.num_tokens()
            prompt = np.array(call.prompt, np.int64)
            growth = tree.growth(prompt, tree.parent_of(prompt))
            node = tree.begin(prompt, CallLimits(len(reply)), trained=trained)
            if trained:
                assert tree.num_tokens() == size_before + growth + len(reply)
            waiting.append((node, call))
        if what == "abandon" and waiting:
            node, call = waiting.pop(choice % len(waiting))
            tree.abandon(node)
            abandoned.append((node, call))
        if what == "adopt" and abandoned:
            node, call = abandoned[choice % len(abandoned)]
            adopted = tree.adoptable(
                np.array(call.prompt, np.int64), CallLimits(len(call.reply)), trained=call.trained
            )
            assert adopted is not None
            pair = next(pair for pair in abandoned if pair[0] is adopted)
            tree.adopt(adopted)
            abandoned.remove(pair)
            waiting.append(pair)
        if what in ("serve", "deliver") and waiting:
            node, call = waiting.pop(-1 if what == "serve" else choice % len(waiting))
            size_before = tree.num_tokens()
            tree.deliver(node, generation(call.reply), messages=())
            naive.deliver(call)
            # Room for it was there already.
            assert tree.num_tokens() <= size_before
    parents = [None if node.parent is None else node.parent.index for node in tree.delivered]
    assert parents == [call.parent for call in naive.delivered]
    rows = tree.rows()
    positions = [(np.flatnonzero(row.loss_mask) + row.prompt_length).tolist() for row in rows]
    assert [
        (row.tokens.tolist(), trained) for row, trained in zip(rows, positions, strict=True)
    ] == naive.rows()
    trained = sum(len(call.reply) for call in naive.delivered if call.trained)
    assert sum(int(row.loss_mask.sum()) for row in rows) == trained
    for node, _ in waiting:
        tree.abandon(node)
    assert tree.num_tokens() == sum(len(row.tokens) for row in rows)


def assistant(content="", *, calls=(), reasoning=None, reply_id="") -> Message:
    return Message("assistant", content, reasoning, tuple(calls), reply_id=reply_id)


def test_the_deepest_known_history_is_found() -> None:
    tree = SessionTree()
    question = Message("user", "q")
    first = serve(tree, [1], [2], messages=[question, assistant("a")])
    second = serve(
        tree, [1, 2, 3], [4], messages=[question, assistant("a"), question, assistant("b")]
    )
    history = [question, assistant("a"), question]
    assert tree.find(history) is first
    assert tree.find([*history, assistant("b")]) is second
    assert tree.find([*history, assistant("c"), question]) is first
    assert tree.find([question]) is None
    assert tree.find([Message("user", "other"), assistant("a")]) is None


def test_among_equal_histories_the_ids_decide_and_then_the_last() -> None:
    tree = SessionTree()
    question = Message("user", "q")
    nodes = [
        serve(tree, [1], [2 + i], messages=[question, assistant("a", reply_id=f"r{i}")])
        for i in range(2)
    ]
    assert tree.find([question, assistant("a", reply_id="r0")]) is nodes[0]
    assert tree.find([question, assistant("a", reply_id="r1")]) is nodes[1]
    assert tree.find([question, assistant("a")]) is nodes[1]


@pytest.mark.parametrize(
    "sent, is_equal",
    [
        (assistant("text", reasoning="why"), True),
        (assistant(" text\n"), True),
        (assistant("text</end>"), True),
        (assistant("text", reasoning="else"), False),
        (assistant("other"), False),
        (Message("user", "text"), False),
    ],
)
def test_what_counts_as_the_same_reply(sent: Message, is_equal: bool) -> None:
    known = assistant("text", reasoning="why")
    assert sent.repeats(known, ["</end>"]) is is_equal


def test_arguments_are_compared_as_json() -> None:
    known = assistant(calls=[ToolCall("a", "f", '{"x": 1, "y": "\\u00e9"}')])
    assert assistant(calls=[ToolCall("b", "f", '{"y":"é","x":1}')]).repeats(known)
    assert not assistant(calls=[ToolCall("a", "f", '{"y": "é", "x": 2}')]).repeats(known)
    assert not assistant(calls=[ToolCall("a", "g", '{"x": 1, "y": "é"}')]).repeats(known)
    broken = assistant(calls=[ToolCall("a", "f", "{")])
    assert broken.repeats(broken)


def test_tools_are_equal_by_value() -> None:
    assert Tool("f", "d", {"a": [1]}) == Tool("f", "d", {"a": [1]})
