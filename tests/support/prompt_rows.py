"""Rows of prompts and their files."""

import json

ROWS = [{"prompt": "a b", "answer": "c", "level": 1}, {"prompt": "dé", "answer": 7, "level": 2}]
CHAT = [{"role": "user", "content": "hi"}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
