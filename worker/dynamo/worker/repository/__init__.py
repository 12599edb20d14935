"""Serves a Triton model repository: folders with `config.pbtxt`, numbered versions, and models of several backends.

| module | holds |
|---|---|
| `control` | a repository inside its process |
| `declared` | what configurations declare, and what a backend is |
| `engine` | the engine that the serving loop sees |
| `models` | loading, unloading and their order; models as they are served |
| `python` | the Python backend, in the worker |
| `scheduling` | batches, sequences, order and rates of requests |
| `sessions` | backends of libraries that run a model as one function |
| `stores` | where the files of models come from |
| `stub` | the Python backend, in the process of a model |
| `wire` | messages between a worker and the process of a Python model |
"""
