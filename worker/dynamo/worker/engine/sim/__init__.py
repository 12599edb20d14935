"""A simulated engine: schedules, caches and publishes like a real one, and computes nothing.

| module | holds |
|---|---|
| `blocks` | the KV memory of one simulated engine rank |
| `engine` | the engine in real time: schedulers on the event loop |
| `examples` | values that match a JSON schema, always the same for the same schema |
| `scheduler` | what one rank does in each step: a continuous batch over paged blocks |
| `script` | what the engine says instead of invented tokens |
| `tiers` | caches beside the GPU: memory of the host, and a store that instances share |
| `timing` | how long a simulated step takes |
| `tokens` | which token comes next |
"""
