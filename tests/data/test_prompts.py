import json

import pytest
import tokenizers
import transformers

from megatron_gspo.config import DataConfig
from megatron_gspo.data.prompt_files import PromptError
from megatron_gspo.data.prompts import PromptSource, build_prompts, load_prompts
from tests.support.prompt_rows import CHAT, ROWS, write_jsonl
from tests.support.samples import CharTokenizer, make_prompt

PINNED = [5, 6, 9, 3, 2, 1, 0, 8, 4, 7]


def test_chat_template_system_prompt_and_template(tmp_path):
    path = write_jsonl(
        tmp_path / "data.jsonl", [{"prompt": "hi", "answer": ""}, {"prompt": CHAT, "answer": ""}]
    )
    chat = DataConfig(chat_template=True, system_prompt="be brief")
    texts = [prompt.text for prompt in load_prompts(path, CharTokenizer(), chat).prompts]
    assert texts == ["<system>be brief<user>hi<assistant>"] * 2
    ids = load_prompts(path, CharTokenizer(), chat).prompts[0].token_ids
    assert ids[0] == ord("<")  # no start token besides the template's own
    path = write_jsonl(path, [{"prompt": "2{}", "answer": ""}])
    prompts = load_prompts(
        path, CharTokenizer(), DataConfig(prompt_template="Q: {question} A:")
    ).prompts
    assert prompts[0].text == "Q: 2{} A:"
    assert prompts[0].messages == [{"role": "user", "content": "Q: 2{} A:"}]


def test_long_prompts_are_dropped_and_counted_or_refused(tmp_path):
    path = write_jsonl(
        tmp_path / "data.jsonl", [{"prompt": "x" * n, "answer": ""} for n in (2, 9, 3, 4)]
    )
    # Start token included.
    loaded = load_prompts(path, CharTokenizer(), DataConfig(max_prompt_length=4))
    assert (loaded.dropped, [p.text for p in loaded.prompts]) == (2, ["xx", "xxx"])
    assert [p.index for p in loaded.prompts] == [0, 1]
    with pytest.raises(
        PromptError, match="line 2: prompt has 10 tokens but max_prompt_length is 4"
    ):
        load_prompts(
            path, CharTokenizer(), DataConfig(max_prompt_length=4, overlong_prompts="error")
        )
    with pytest.raises(PromptError, match="all 4 prompts are longer than max_prompt_length 1"):
        load_prompts(path, CharTokenizer(), DataConfig(max_prompt_length=1))


def test_tokenizer_without_chat_template(tmp_path):
    class Bare:
        encode = CharTokenizer.encode

    path = write_jsonl(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(
        PromptError, match="the tokenizer has no chat template; set chat_template to false"
    ):
        load_prompts(path, Bare(), DataConfig(chat_template=True))


TEMPLATE = (
    "{% if tools %}[tools]{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}{% for"
    " m in messages %}{% if m.role != 'function' %}[{{ m.role }}] {{ m.content }}\n{% endif %}{%"
    " endfor %}{% if add_generation_prompt %}[assistant] {% if enable_thinking is false"
    " %}<think></think>{% endif %}{% endif %}"
)
TURN = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "ho"}
TOOLS = [{"type": "function", "function": {"name": "adder", "parameters": {}}}]


def real_tokenizer(template=TEMPLATE, start=0, end=0):
    """A tokenizer of Transformers with a token per character.

    start, end: how many <s> and </s> it adds.
    """
    vocabulary = {
        token: i
        for i, token in enumerate(["<s>", "</s>", "<unk>", *map(chr, range(32, 127)), "\n"])
    }
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    if start or end:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=" ".join(["<s>"] * start + ["$A"] + ["</s>"] * end),
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = template
    return made


def read(rows, tokenizer=None, **settings):
    """(prompts, notes) of rows."""
    located = [(f"f line {number}", row) for number, row in enumerate(rows, start=1)]
    loaded = build_prompts(
        located, tokenizer or real_tokenizer(), DataConfig(**settings), source="f"
    )
    return loaded.prompts, "\n".join(loaded.notes)


def read_one(row, tokenizer=None, **settings):
    prompts, notes = read([{"answer": "1"} | row], tokenizer, **{"chat_template": True} | settings)
    return prompts[0], notes


def test_messages_that_end_with_the_assistants():
    row = {"prompt": [TURN, REPLY]}
    with pytest.raises(
        PromptError,
        match="line 1: key 'prompt' ends with a message of the assistant; set data.last_",
    ):
        read_one(row)
    dropped, notes = read_one(row, last_assistant_message="drop")
    assert (dropped.text, dropped.answer, notes) == ("[user] hi\n[assistant] ", "1", "")
    assert dropped.messages == [TURN]
    answered, _ = read_one(row, last_assistant_message="answer")
    assert (answered.text, answered.answer) == ("[user] hi\n[assistant] ", "ho")
    continued, _ = read_one(row, last_assistant_message="continue")
    assert (continued.text, continued.answer) == ("[user] hi\n[assistant] ho", "1")
    assert continued.messages == [TURN, REPLY]
    for action in ("drop", "answer", "continue"):
        alone = [REPLY] if action != "continue" else [REPLY | {"content": ""}]
        with pytest.raises(
            PromptError, match="line 1: key 'prompt' (has no message before|is empty)"
        ):
            read_one({"prompt": alone}, last_assistant_message=action)
    with pytest.raises(
        PromptError, match="ends with a message of role 'user', and data.last_assistant_message is"
    ):
        read_one({"prompt": [TURN]}, last_assistant_message="answer")
    with pytest.raises(PromptError, match="the assistant's last message has no text"):
        read_one({"prompt": [TURN, REPLY | {"content": None}]}, last_assistant_message="answer")


def test_tools_reach_the_template():
    for tools in (TOOLS, json.dumps(TOOLS)):
        prompt, notes = read_one({"prompt": "hi", "tools": tools})
        assert prompt.text == "[tools] adder[user] hi\n[assistant] " and notes == ""
    for tools in ([], None, ""):
        assert read_one({"prompt": "hi", "tools": tools})[0].text == "[user] hi\n[assistant] "
    bare = real_tokenizer(TEMPLATE.replace("tools", "absent"))
    assert (
        "f line 1: the chat template writes no tools"
        in read_one({"prompt": "hi", "tools": TOOLS}, bare)[1]
    )
    assert (
        "the field tools is no list of tool definitions"
        in read_one({"prompt": "hi", "tools": ["adder"]})[1]
    )
    assert (
        "only a chat template writes it"
        in read_one({"prompt": "hi", "tools": TOOLS}, chat_template=False)[1]
    )


def test_options_reach_the_template():
    prompt, _ = read_one({"prompt": "hi"}, chat_template_options={"enable_thinking": False})
    assert prompt.text == "[user] hi\n[assistant] <think></think>"
    with pytest.raises(
        PromptError,
        match="data.chat_template_options.enable_thinkin: the tokenizer's chat template",
    ):
        read_one({"prompt": "hi"}, chat_template_options={"enable_thinkin": False})


@pytest.mark.parametrize("start, end", [(1, 0), (0, 1), (1, 1), (2, 1)])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_never_ends_with_an_end_token_of_the_tokenizer(chat, start, end):
    prompt, notes = read_one(
        {"prompt": "hi"}, real_tokenizer(start=start, end=end), chat_template=chat
    )
    plain = real_tokenizer().encode(prompt.text)
    assert prompt.token_ids.tolist() == [0] * (start > 0 and not chat) + plain
    assert ("ends the prompt with </s>, which is removed" in notes) == (end > 0 and not chat)
    assert ("adds a second <s>, which is removed" in notes) == (start > 1 and not chat)


def test_a_tokenizer_that_adds_its_tokens_to_rendered_prompts_too():
    class Stubborn:
        def __init__(self):
            self.inner = real_tokenizer()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def encode(self, text, add_special_tokens=True):
            return [0, *self.inner.encode(text, add_special_tokens=False), 1]

    template = "<s>" + TEMPLATE
    tokenizer = Stubborn()
    tokenizer.inner.chat_template = template
    prompt, notes = read_one({"prompt": "hi"}, tokenizer)
    ids = prompt.token_ids.tolist()
    assert ids[0] == 0 and ids[1] != 0 and ids[-1] != 1 and notes.count("which is removed") == 2
    with_end, _ = read_one({"prompt": "hi</s>"}, tokenizer, chat_template=False)
    assert with_end.token_ids.tolist()[-1] == 1  # the row's own


def test_system_messages_of_a_column():
    row = {"prompt": "hi", "system": "be brief"}
    prompt, notes = read_one(row)
    assert prompt.text == "[user] hi\n[assistant] "
    assert "data.system_prompt_key=system takes it" in notes
    prompt, notes = read_one(row, system_prompt_key="system")
    assert prompt.text == "[system] be brief\n[user] hi\n[assistant] " and notes == ""
    assert (
        read_one(row | {"system": None}, system_prompt_key="system")[0].text
        == "[user] hi\n[assistant] "
    )
    with pytest.raises(
        PromptError, match="key 'sytem' is missing .* set system_prompt_key to the right one"
    ):
        read_one(row, system_prompt_key="sytem")
    with pytest.raises(PromptError, match="has a system message and system_prompt_key is set"):
        read_one(
            row | {"prompt": [{"role": "system", "content": "x"}, TURN]}, system_prompt_key="system"
        )


@pytest.mark.parametrize("value", [None, "", float("nan")])
def test_a_missing_answer_is_said(value):
    prompts, notes = read([{"prompt": "a", "answer": value}, {"prompt": "b", "answer": 2}])
    assert [prompt.answer for prompt in prompts] == ["" if value == "" else None, "2"]
    assert notes == "f line 1: key 'answer' has no value; a verifier that needs it fails on it"


def test_halves_of_surrogate_pairs_become_text_that_can_be_written():
    rows = [
        {"prompt": "a\ud83d", "answer": "b\ude00", "x": {"\ud83d": ["\ud83d"]}},
        {"prompt": json.dumps([{"role": "user", "content": "\ud83d"}]), "answer": "c"},
    ]
    prompts, notes = read(rows, chat_template=True)
    assert [prompt.text for prompt in prompts] == [
        "[user] a\ufffd\n[assistant] ",
        "[user] \ufffd\n[assistant] ",
    ]
    assert (prompts[0].answer, prompts[0].metadata) == ("b\ufffd", {"x": {"\ufffd": ["\ufffd"]}})
    assert "f line 1: has half of a surrogate pair" in notes and "(and in 1 other rows)" in notes


def test_what_is_doubtful_is_said():
    function = [TURN, {"role": "function", "content": "secret"}]
    assert (
        "leaves out or changes the message of role 'function'" in read_one({"prompt": function})[1]
    )
    assert "special token '</s>'; if it is formatted already" in read_one({"prompt": "hi</s>"})[1]
    assert "the field images is not in the prompt" in read_one({"prompt": "hi", "images": ["x"]})[1]
    assert (
        "prompt_template is not applied"
        in read_one({"prompt": [TURN]}, prompt_template="{question}!")[1]
    )
    ends = real_tokenizer("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    assert "does not begin the assistant's turn" in read_one({"prompt": "hi"}, ends)[1]
    assert read_one({"prompt": "hi"})[1] == ""


def test_copies_are_counted():
    prompts, notes = read([{"prompt": text, "answer": "1"} for text in "aabac"])
    assert len(prompts) == 5
    assert (
        notes
        == "f: 2 of 5 prompts repeat another one (3 are distinct); each copy is a prompt of its own"
    )


def test_deep_rows_end_in_one_line():
    deep: list = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(PromptError, match="f line 1: is nested too deeply; write it flatter"):
        read([{"prompt": "a", "answer": "1", "x": deep}])


def source(count=10, **options):
    return PromptSource([make_prompt(index) for index in range(count)], **options)


def test_order_is_a_permutation_that_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch): tuple(source(seed=seed).order(epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert all(sorted(order) == list(range(10)) for order in orders.values())
    assert len(set(orders.values())) == 9
    # pinned: a resumed run must draw the same prompts on any machine and numpy version
    assert source(seed=1).order(2).tolist() == PINNED
    assert source(shuffle=False).order(5).tolist() == list(range(10))


def test_batches_cover_the_epoch_and_resume_from_the_cursor_alone():
    cursor = 0
    seen = []
    cursors = []
    for _ in range(7):
        cursors.append(cursor)
        batch, cursor = source(seed=3).batch(cursor, 3)
        seen.append([prompt.index for prompt in batch])
    # 3 batches of 3 an epoch; the tenth prompt of each epoch is passed over
    assert cursors == [0, 3, 6, 9, 13, 16, 19]
    for epoch in range(2):
        drawn = sum(seen[3 * epoch : 3 * epoch + 3], [])
        assert drawn == source(seed=3).order(epoch)[:9].tolist()
    resumed, cursor = source(seed=3).batch(cursors[4], 3)
    assert [prompt.index for prompt in resumed] == seen[4] and cursor == cursors[5]


def test_a_batch_larger_than_the_source_is_refused():
    batch, cursor = source().batch(0, 10)
    assert sorted(prompt.index for prompt in batch) == list(range(10)) and cursor == 10
    with pytest.raises(
        PromptError, match="a batch needs 11 prompts and there are 10; lower rollout_batch_size"
    ):
        source().batch(0, 11)
    with pytest.raises(PromptError, match="cursor is -1"):
        source().batch(-1, 2)
    with pytest.raises(PromptError, match="at least one prompt"):
        source(0)
