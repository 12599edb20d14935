"""KV caches, as every process speaks of them.

| module | holds |
|---|---|
| `events` | KV cache events of a worker |
| `hashes` | names for cached prefixes |
| `tiers` | where an instance keeps a cached block |
"""
