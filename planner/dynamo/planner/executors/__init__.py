"""Who carries out what the planner decides: a platform that starts and ends instances, or a program that follows the decisions.

| module | holds |
|---|---|
| `base` | the protocol, and how it fails |
"""
