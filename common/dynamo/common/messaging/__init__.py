"""What travels over NATS, and what is kept in JetStream.

| module | holds |
|---|---|
| `buffers` | what a body is made of |
| `jetstream` | records, files and KV events that are kept in JetStream |
| `nats` | a connection to NATS |
| `request_plane` | requests and streamed responses, from frontends to instances and back |
| `unreadable` | messages of others that cannot be read: one log line for many, and a count |
"""
