"""Gated delta net: linear attention of Qwen3-Next and Qwen3.5."""
