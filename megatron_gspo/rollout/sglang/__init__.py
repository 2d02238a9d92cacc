"""SGLang's request and response formats and endpoints.

sglang itself is not imported: servers have their own Python.
"""
