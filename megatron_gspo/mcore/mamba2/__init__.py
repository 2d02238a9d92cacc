"""Mamba-2: the state space layers of Nemotron-3."""
