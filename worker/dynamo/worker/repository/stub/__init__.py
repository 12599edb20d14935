"""What runs in the process of a Python-backend model; only the Python of the model's environment is there.

| module | holds |
|---|---|
| `dlpack` | tensors of other libraries by DLPack, and ours for them |
| `executed` | what code that an `execute` runs needs to know of it |
| `launcher` | starts `process` with the Python of another environment |
| `loop` | the socket of the process, and its two threads |
| `memory` | shared memory as the process sees it |
| `model_process` | the model in its process |
| `pb_metrics` | the part of `pb_utils` about metrics |
| `pb_requests` | the part of `pb_utils` about requests and responses, and the channel to the worker |
| `pb_tensors` | the part of `pb_utils` about tensors, their datatypes, and errors |
| `pb_utils` | what models of Triton's Python backend import as `triton_python_backend_utils` |
| `process` | the process of one instance of a Python-backend model |
"""
