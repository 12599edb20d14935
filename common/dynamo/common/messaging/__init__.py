"""The request plane: requests and streamed responses over NATS.

| module | holds |
|---|---|
| `frames` | what travels: typed frames, many to a NATS message |
| `outbox` | batches what one event-loop turn has for one peer into messages |
| `login` | credentials and TLS of a connection, checked before anything is started |
| `connection` | one NATS connection with fast publish and dispatch paths, beside nats-py's own |
| `client` | `RequestClient`: opens streams to instances, retries nothing |
| `server` | `RequestServer`: takes requests for one instance |
| `key_values` | a key-value bucket whose entries carry a digest |
| `objects` | read what lies in an object store, a piece at a time |
| `records` | `RecordStore`: records that any process may read and change |
| `store` | small files (tokenizers, templates) in the object store |
"""
