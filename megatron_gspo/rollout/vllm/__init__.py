"""vLLM's request and response formats and endpoints.

vllm itself is not imported: servers have their own Python.
"""
