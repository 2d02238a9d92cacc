"""Weights in eight bits for rollouts: the formats, which modules have them, and streams of
tensors in them.
"""
