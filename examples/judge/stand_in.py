"""Stands where a judge would be served, to try `judge` and `judge_ranking` on a CPU: the score is the
share of the answer's letters that the response has in their places.

python examples/judge/stand_in.py          # port 8000; ends with Ctrl-C
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = re.compile(r"# Reference answer\n\n(.*?)\n\n# Response", re.DOTALL)
RESPONSE = re.compile(r"# Response(?: \d+)?\n\n(.*?)(?=\n\n# Response|\Z)", re.DOTALL)


def verdict_of(text: str) -> dict[str, str | float | list[int]]:
    """The verdict on a default template's text, of one response or of several."""
    answer = ANSWER.search(text)
    assert answer is not None, "give prompts with answers, and no template"
    scores = [share_of_letters(answer[1], response) for response in RESPONSE.findall(text)]
    if len(scores) == 1:
        return {"reason": "The share of right letters.", "score": scores[0]}
    numbers = range(1, len(scores) + 1)
    best_to_worst = sorted(numbers, key=lambda number: -scores[number - 1])
    return {"reason": "By the share of right letters.", "best_to_worst": best_to_worst}


def share_of_letters(answer: str, response: str) -> float:
    """Of the longer one's, those that are equal in their places."""
    right = sum(a == b for a, b in zip(answer, response, strict=False))
    return right / max(len(answer), len(response))


class ChatCompletions(BaseHTTPRequestHandler):
    """OpenAI's protocol, as far as it is used."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verdict = verdict_of(request["messages"][-1]["content"])
        message = {"role": "assistant", "content": json.dumps(verdict)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        payload = json.dumps({"object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


class Judge(ThreadingHTTPServer):
    """With room for `concurrency` connections that arrive together; the system drops those beyond
    it, and a client tries again after a second, three, seven, ...
    """

    request_queue_size = 128


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    Judge(("127.0.0.1", port), ChatCompletions).serve_forever()
