"""Write the messages that need an explanation into docs/troubleshooting.md, from the cases of this
folder:

    python -m tests.bad_input.page

The messages of a group stand between two comments, `<!-- messages: Routes -->` and `<!-- /messages
-->`. A message that is not in FIXES names its fix itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.bad_input import (
    test_config,
    test_disk,
    test_evaluate,
    test_model,
    test_prompts,
    test_ranks,
    test_rewards,
    test_rollouts,
    test_routes,
)
from tests.support.command_line import Case

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
BLOCK = re.compile(r"<!-- messages: (.+) -->\n(?:.*\n)*?<!-- /messages -->")
GROUPS: dict[str, tuple[Case, ...]] = {
    "Messages": (
        *test_config.CASES,
        *test_config.NOT_INSTALLED.values(),
        test_config.ALONE,
        test_config.NO_GPU,
        test_config.NO_NUMBER,
        test_config.PORT_IN_USE,
        *test_model.CASES,
        *test_prompts.CASES,
        *test_rewards.CASES,
        *test_rollouts.CASES,
        *test_rollouts.DIVERGED,
        test_rollouts.OTHER_MODEL,
        *(case for case, _, _ in test_disk.CASES),
        test_disk.FULL_AGAIN,
        *test_ranks.CASES,
        *test_evaluate.CASES,
    ),
    "Routes": (*test_routes.CASES,),
}
CASES = tuple(case for cases in GROUPS.values() for case in cases)
# The cause or fix, by the name of a case, where the message does not name it or a page says more.
FIXES = {
    "token clip under GSPO": "use about 3e-4, or [measure](algorithms.md#choosing-the-clip-range)",
    "GSPO averaged over tokens": (
        "the fields are those of another algorithm: [what is refused](algorithms.md#what-is-refused)"
    ),
    "TP doesn't fit the world": (
        "change `--nproc-per-node` or a size; without torchrun there is 1 process"
    ),
    "unknown model type": (
        "supported: [models](models.md); [add a family](models.md#add-a-family)"
    ),
    "missing weight": "weights of another model, or an incomplete download",
    "no end token": "set `eos_token_id` in the model's `generation_config.json`",
    "tokenizer of another model": (
        "tokenizer and `config.json` are of different models, or padding was not removed"
    ),
    "positive log-prob": "probabilities or logits instead of log-probs",
    "server of another model": (
        "the server has another model, or ignores a key, as "
        "[SGLang tied embeddings](sglang.md#agreement-of-the-engines)"
    ),
    "weights that diverged": "resume from an earlier checkpoint: move the newest away",
    "routes with a row too few": "the text was tokenised again, or the prompt's routes are missing",
    "routes of no sample": "let the engine return routes; SGLang: `--enable-return-routed-experts`",
    "verifier that raises": ("no response was scored: call the verifier on a line of `samples/`"),
    "checkpoint on a full disk": "free space, or lower `checkpoint.keep`",
}


def messages(cases: tuple[Case, ...]) -> str:
    """A Markdown table of the messages with a fix."""
    fixes: dict[str, str] = {}
    for case in cases:
        if case.name in FIXES:
            phrase = re.sub(r"[1-9]\d*", "...", case.phrase)  # numbers are those of the case
            phrase = f"{phrase}..." if phrase.endswith(" ") else phrase
            fixes.setdefault(phrase, FIXES[case.name])
    table_lines = [f"| `{phrase}` | {fix} |" for phrase, fix in fixes.items()]
    return "\n".join(["| message contains | cause, fix |", "| --- | --- |", *table_lines])


def filled(text: str) -> str:
    """The page's text with the messages of each group.

    Raises ``KeyError`` for a comment that names no group.
    """
    return BLOCK.sub(
        lambda m: f"<!-- messages: {m[1]} -->\n\n{messages(GROUPS[m[1]])}\n\n<!-- /messages -->",
        text,
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
