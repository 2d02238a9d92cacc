"""Rehearsal of a training step of any rank of a GPU cluster, on one CPU."""
