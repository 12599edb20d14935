"""Runs workers written for NVIDIA Dynamo, unchanged: `python -m dynamo.worker.compat worker.py [ARGUMENTS]`.

Such a worker imports `dynamo.llm` and `dynamo.runtime`. These modules stand in for them in this process only, and only when it
was started this way: nothing here is imported otherwise.

| module | holds |
|---|---|
| `engines` | engines around the handlers of NVIDIA Dynamo's workers, which take and yield dictionaries |
| `llm` | stands in for `dynamo.llm` |
| `models` | what a worker says about a model |
| `runtime` | stands in for `dynamo.runtime` |
"""
