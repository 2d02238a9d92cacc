"""Objectives as data, without torch: what configs and worker processes read of them."""
