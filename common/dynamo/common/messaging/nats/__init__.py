"""A connection to NATS.

| module | holds |
|---|---|
| `connection` | one NATS connection with fast publish and dispatch paths, beside nats-py's own |
| `login` | credentials and TLS of a connection, checked before anything is started |
| `socket_transport` | the socket under nats-py: its transport, and a protocol of the event loop |
"""
