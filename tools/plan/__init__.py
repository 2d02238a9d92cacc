"""Estimated memory and step time of each layout of a model on a cluster."""
