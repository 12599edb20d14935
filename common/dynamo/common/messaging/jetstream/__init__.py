"""What is kept in JetStream.

| module | holds |
|---|---|
| `key_values` | a key-value bucket whose entries carry a digest |
| `kv_stream` | KV events on record: a stream, and snapshots in an object store |
| `objects` | read what lies in an object store, a piece at a time |
| `reasons` | what errors of JetStream say to an operator |
| `records` | `RecordStore`: records that any process may read and change |
| `replicas` | how many replicas JetStream keeps of what this project stores in it |
| `store` | small files (tokenizers, templates) in the object store |
"""
