"""Names for models: what operators let requests call a model, beside the names that workers register.

| module | holds |
|---|---|
| `rules` | what a name stands for: targets with weights, fallbacks, shadows; and the bounds of a table of names |
| `plan` | from a name to the models that one request tries, in order; plain computation |
| `__main__` | `dynamo-models`, a command that reads and changes the table through a frontend |
| `table` | the table in etcd: followed, read and changed |
"""
