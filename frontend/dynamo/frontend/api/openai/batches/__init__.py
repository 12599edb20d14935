"""Files and batches, as OpenAI has them.

| module | holds |
|---|---|
| `multipart` | the body of an upload |
| `files` | files in JetStream, bound to the API key that made them |
| `batch` | a batch, its lines, and where both lie in JetStream |
| `lines` | how lines use the account of their key |
| `runner` | carries out the batches whose lease this process holds |
| `operations` | `/v1/files` and `/v1/batches` |
"""
