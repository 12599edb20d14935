"""Triton's Python backend, as the worker sees it; `stub` is what runs in the process of a model.

| module | holds |
|---|---|
| `call_window` | how many responses to one call of a model may be on the way to it |
| `codes` | errors of models as errors of ours, and ours as Triton's codes |
| `custom_metrics` | metrics that Python models declare and change themselves, shown among those of the worker |
| `environments` | Python environments of models: `EXECUTION_ENV_PATH` |
| `process_memory` | shared memory between the worker and one process of a model, as the worker sees it |
| `process_requests` | requests as the process of a model gets them |
| `python_backend` | `model.py` with a class TritonPythonModel, each instance in a process of its own |
| `stub_process` | one instance of a model: a process, and the messages to and from it |
"""
