"""Which instance gets a request. All of it is plain computation: no asyncio, no I/O.

| module | holds |
|---|---|
| `base` | the interface of routers: their input, their decision, and the protocol |
| `cache` | which instances hold which prefixes |
| `cost` | what a request would cost at each instance |
| `cost_terms` | the weights and the tuned constants of the KV router's cost in seconds |
| `demand` | the demand for each pool, counted where requests get an instance or are refused one |
| `explain` | a log of explained routing decisions |
| `explanation` | the explanation of a routing decision, as clients and the decision log see it |
| `fetch` | what an instance fetches of a prompt from slower tiers, and what it found there |
| `kv` | routing by KV cache overlap and load |
| `loads` | the load of each instance, and from which load on it is busy |
| `measured` | a router that reports the time and the outcome of its decisions, counts the demand, and explains some |
| `model_index` | what the KV router knows of one model |
| `overrides` | router settings that a single request may override, and their ranges |
| `policies` | policies by load, session and sequence |
| `select` | makes the router that the options describe |
| `simple` | routers that use neither KV caches nor load |
| `tiers` | what candidates have of a prompt on tiers slower than their GPU's memory, and what became of it |
"""
