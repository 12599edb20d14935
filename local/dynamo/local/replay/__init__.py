"""`dynamo-local replay`: a trace of requests against a simulated fleet in virtual time, for several router modes side by side.

| module | holds |
|---|---|
| `command` | `dynamo-local replay [TRACE] [FLAGS]` |
| `config` | the configuration of `dynamo-local replay` |
| `figures` | what a replay measured, and how it is shown |
| `fleet` | a fleet that exists in virtual time only |
| `planned` | a replay in which a planner decides how many workers there are |
| `plot` | the comparison, drawn |
| `trace` | traces in Mooncake's format |
"""
