"""Counts what a request of each path takes, without a clock: `make costs`.

| module | holds |
|---|---|
| `counting` | counts calls, instructions, system calls and messages of each process |
| `command` | the command, and what it prints |
| `clock` | the functions of `time`, in virtual time |
| `deployment` | frontends and workers in one process: the real ones, on the simulated loop, network, NATS and etcd |
| `edge` | connections of HTTP and gRPC clients to them |
| `python_model` | what stands in for the process of a Python model |
| `requests`, `picks`, `events` | what is counted: requests; those of gateways; events, decisions and idle seconds |
| `recording` | counts one thing after the other |
| `figures` | the file of figures, and the comparison with it |
"""
