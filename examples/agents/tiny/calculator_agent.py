"""The agent of openai_agents.py, rehearsed."""

from openai_agents import run
from rehearsal import rehearse

rehearse(run)
