"""What a request would cost at each instance.

| module | holds |
|---|---|
| `fetching` | how long instances take to fetch cached blocks from slower tiers, learned from times to first token |
| `goals` | which requests are refused because latency goals would be missed otherwise |
| `latency` | the cost of an instance in seconds |
| `prompts` | the part of a prompt that the cost of an instance depends on |
| `spreading` | when a prefix is worth computing on one more instance |
| `step_model` | how long the steps of a model's engines take, learned from their load reports |
| `traffic` | how many requests arrive, and how many prompt tokens they bring, as of now |
| `weights` | the cost in KV blocks: `--router-cost weights` |
"""
