"""What runs in every process, whatever it serves.

| module | holds |
|---|---|
| `background` | tasks with an owner |
| `decaying` | a counter that forgets |
| `fair_line` | a line in which owners have turns |
| `interpreter` | which Python runs this process, and how it was built |
| `lazy_event` | an event for what is seldom waited for |
| `memory` | freed memory: kept for the next large message, and given back after a while |
| `ports` | ports that are free and stay this process's own |
| `steps` | long work on the event loop, in steps of a few milliseconds |
| `turns` | time for what has come on all connections together |
| `work` | long work as a generator, which `steps` runs |
"""
