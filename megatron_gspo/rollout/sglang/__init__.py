"""Rollouts from SGLang servers over HTTP. Nothing here imports sglang: the servers have an environment of their own.

`engine` is the `RolloutEngine`; `http` one server's connection; `answers` what is accepted from it; `fleet` which
servers may serve; `weights` how they get the trained weights; `servers` those that the run starts itself.
"""
