#!/bin/sh
# The agent Claude Code (docs/agent_packages.md). Address, key and task are in the environment.
# agents:
#   command: [sh, examples/agents/claude_code.sh]
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_TELEMETRY=1 DISABLE_AUTOUPDATER=1
exec claude -p "$TASK" --model policy --max-turns 20 --output-format json </dev/null
