"""The request plane: requests and streamed responses over NATS.

| module | holds |
|---|---|
| `client` | `RequestClient`: opens streams to instances, retries nothing |
| `credit` | how much of a process's budget each stream may have on the way |
| `frames` | what travels: typed frames, many to a NATS message |
| `incoming` | a request that an instance takes, its body complete, and the way back to its caller |
| `instance_peer` | an instance, as the client of the request plane knows it |
| `limits` | bounds and intervals, on which the two sides need not agree |
| `outbox` | batches what one event-loop turn has for one peer into messages |
| `request_stream` | one request at one instance, and its responses, as the caller follows them |
| `server` | `RequestServer`: takes requests for one instance |
"""
