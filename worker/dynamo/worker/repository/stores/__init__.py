"""Where the files of models come from, and where copies of them are kept.

| module | holds |
|---|---|
| `content_cache` | folders on this machine that are made once and shared by all workers |
| `object_store` | object stores, read by fsspec |
| `remote_repository` | a model repository in an object store |
| `source` | files of a model that a load request brings or names |
"""
