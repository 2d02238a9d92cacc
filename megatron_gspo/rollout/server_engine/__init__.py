"""Rollouts from inference servers of any kind over HTTP.

`rollout_client`: a rank's client of all servers, with requests, retries and deadlines.
`server_pool`: which servers may get requests. `request_stream`: groups in flight.
`partial_response`: a response of several requests. `server_api`: what a kind of server must define;
SGLang's is `rollout/sglang/sglang_api.py`.
"""
