"""An agent without packages, run as a program of its own.

python stdlib_agent.py DOES...: what it does, in order.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request


def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)


def call(messages: list[dict]) -> None:
    messages.append({"role": "user", "content": os.environ["TASK"]})
    answer = post("chat/completions", {"model": "policy", "messages": messages})
    messages.append(answer["choices"][0]["message"])


def main() -> None:
    messages: list[dict] = []
    for step in sys.argv[1:]:
        what, _, value = step.partition("=")
        if what == "call":
            call(messages)
        elif what == "reward":
            post("reward", {"reward": float(value)})
        elif what == "exit":
            sys.exit(int(value))
        elif what == "hang":
            time.sleep(600)
        elif what == "ignore_sigterm":
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif what == "daemon":  # in a session of its own; its process id goes to a file
            daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open(value, "w") as file:
                file.write(str(daemon.pid))
        elif what == "environment":
            with open(value, "w") as file:
                json.dump({"env": dict(os.environ), "directory": os.getcwd()}, file)


if __name__ == "__main__":
    main()
