"""The KV caches of all instances, kept in step.

| module | holds |
|---|---|
| `archive` | the snapshot that a history begins with |
| `feed` | keeps a router in step with the caches and loads that instances publish |
| `follow` | following one instance's updates over a bus that may lose, repeat, reorder or delay them |
| `history` | the recorded history: a snapshot, and the events since |
"""
