#!/bin/sh
# The agent Codex (docs/agent_packages.md). Address, key and task are in the environment.
# agents:
#   command: [sh, examples/agents/codex.sh]
CODEX_HOME=$HOME/.codex && export CODEX_HOME && mkdir "$CODEX_HOME" || exit 1
cat >"$CODEX_HOME/config.toml" <<EOF
model = "policy"
model_provider = "trainer"
[model_providers.trainer]
name = "trainer"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
EOF
exec codex exec --skip-git-repo-check --sandbox workspace-write "$TASK" </dev/null
