"""Rollouts from inference servers of any kind over HTTP.

`server_engine`: the `RolloutEngine`, which owns the servers' states. `rollout_client`: one of
several clients. `server_pool`: which servers may get requests. `generation_client`: requests,
retries and deadlines of one response. `request_stream`: groups in flight. `partial_response`: a
response of several requests. `server_api`: what a kind of server must define; SGLang's is
`rollout/sglang/sglang_api.py`.
"""
