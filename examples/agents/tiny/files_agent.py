"""The agent of mini_swe_agent.py, rehearsed."""

from mini_swe_agent import run
from rehearsal import rehearse

rehearse(run, test="true")
