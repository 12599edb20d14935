"""Policies, and filters around them.

| module | holds |
|---|---|
| `affinity` | the requests of one session go to one instance |
| `balance` | routing by load only |
| `busy_filter` | a filter that hides busy instances from routers that ignore load |
| `sequences` | the requests of one sequence go to one instance, on which all frontends agree |
"""
