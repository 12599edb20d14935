"""Models as they are loaded, served and unloaded.

| module | holds |
|---|---|
| `ensemble` | models made of other models, tensors flowing between them by name |
| `loaded` | one model as it is served: its versions, loaded, and the requests that are open |
| `model_calls` | requests of one model to another, in the same worker |
| `model_folders` | where the files of models are |
| `model_gauges` | gauges of the loaded models of a repository, under Triton's names |
| `models` | loading, unloading, dependencies, and the index of states |
| `opening` | the versions of a model, opened by its backend |
| `response_cache` | responses kept for equal requests |
| `settings` | what a repository is given |
| `warmup` | requests that are sent to a model before it becomes ready |
"""
