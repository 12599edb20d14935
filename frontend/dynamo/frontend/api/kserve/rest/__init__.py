"""KServe v2 over HTTP, with Triton's extensions of it.

| module | holds |
|---|---|
| `bodies` | bodies on the wire |
| `elements` | elements of tensors as JSON writes them, and their raw form |
| `generate` | POST …/generate and …/generate_stream |
| `generate_requests` | the flat JSON of …/generate as a ModelInferRequest |
| `handlers` | the handlers of KServe v2 over HTTP |
| `infer` | POST …/infer |
| `json_types` | values in JSON, and how Triton says that they are of another type |
| `long_arrays` | long arrays in JSON, handled in steps |
| `long_strings` | long strings of JSON, read and written piece by piece |
| `long_tensors` | tensors whose data is a long array in JSON |
| `model_files` | the files in a JSON request to load a model, in base64 |
| `operations` | the operations of KServe v2 over HTTP |
| `paths` | which model a path below /v2 names |
| `repository` | Triton's model repository extension over HTTP |
| `requests` | a request in JSON, with or without binary tensors, as the ModelInferRequest that gRPC would carry |
| `responses` | a ModelInferResponse as JSON, followed by the tensors that were requested in binary |
| `settings` | Triton's extensions for trace settings, log settings and shared memory over HTTP |
"""
