"""The whole fleet in one process, in virtual time, under faults drawn from a seed.

One seed is one history: which processes there are, what clients request, and what breaks when. Frontends and workers are the real
ones, down to the NATS client's socket and the messages to etcd; simulated are the clock, the network, nats-server and etcd. A
history that breaks an invariant is printed, and happens again when its seed is run again.

| module | holds |
|---|---|
| `clock` | the event loop: virtual time, and processes that can be paused and killed |
| `network` | connections with latency, which can be cut, held and narrowed |
| `nats_server` | nats-server's client protocol, at most once |
| `jetstream` | its streams, behind key-value buckets and object stores |
| `etcd_server` | etcd: keys, leases, watches, compaction |
| `process` | one frontend, one worker |
| `stores` | files, batches, responses in the background, limits and the ledger of one frontend |
| `hosts` | which processes share memory |
| `clients` | requests, and whether their responses are right |
| `tokens` | what language models generate |
| `kept` | clients of what frontends keep, and what must be there in the end |
| `faults` | what can break, drawn from the seed |
| `history` | one run: who lives, what happened, which invariants hold |
| `milestones` | what histories must come to, sometimes, and where none has been |
| `observers` | how a history learns that it came to a milestone |
| `__main__` | `python -m tests.simulation`: many seeds on all cores, resumable |
"""
