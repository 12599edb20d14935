"""Messages between a worker and the process of a Python-backend model.

| module | holds |
|---|---|
| `calls` | calls of models by models of the same worker |
| `link` | the worker's end of the socket to a model's process |
| `raw_tensors` | tensors in the form in which messages carry them |
| `wire` | the messages |
"""
