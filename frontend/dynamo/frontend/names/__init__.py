"""Names for models: what operators let requests call a model, beside the names that workers register.

| module | holds |
|---|---|
| `__main__` | `dynamo-models`, a command that reads and changes the table through a frontend |
| `plan` | from a name to the models that one request tries |
| `rules` | what a name stands for, and when a table of names is valid |
| `table` | the table in etcd: followed, read and changed |
"""
