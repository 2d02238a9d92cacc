"""Agents that call the policy over HTTP: their calls are recorded, and become rows to train on.

A call comes to the `endpoint`. One of the `dialects` translates it to a `conversation.Call`. The
run, an `agent_run`, makes it a prompt (`rendering`), draws a reply (`generation`; on the engines
`engine_generators`), reads it (`reply_parsing`) and records it when it is delivered
(`session_tree`).

A run is asked for by a group of samples (`agent_source`) and played by an `agent_host`. One of the
`players` starts the agent's program (`runner`, with an `agent_keeper`; `function_program`, with a
`function_server`), or a runner claims the run from the `run_queue`. `agent_session` follows it to
its end and its reward (`run_verifier`), and `run_samples` makes it a sample.

All of this but the embedded engine is in a process beside the trainer (`agent_process`; in the
process `hosted_process` and `hosted_agents`), which is built from `host_settings`, speaks in
`process_messages` and calls inference servers itself.
"""
