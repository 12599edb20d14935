"""Serves a Triton model repository: folders with `config.pbtxt`, numbered versions, and models of several backends.

| module | holds |
|---|---|
| `layout` | what lies in a repository folder: models, versions, which of them are to be served |
| `model_config` | `config.pbtxt` and its JSON form, checked; instance groups |
| `agents` | the checksum agent |
| `source` | where a model's files come from: the repository, a request's own files, a path or object-store URL |
| `object_store`, `remote_repository` | object stores, their URLs and credentials; a repository in one |
| `execution` | what a backend is, and what a request looks like to it |
| `python_backend`, `ensemble`, `session` | the backends; `session` is that of libraries which run a model as one function |
| `onnx_backend`, `torch_backend`, `openvino_backend`, `tensorrt_backend` | those libraries |
| `batches`, `ragged` | dynamic batching as a configuration declares it; requests of different shapes in one batch |
| `sequences`, `sequence_tensors` | sequence batching; the inputs that it adds |
| `rate_limiter` | resources that models share |
| `pipeline`, `responses` | the requests of a Python-backend model on their way through its processes |
| `stub_process`, `link`, `wire` | one such process as the worker sees it; the socket to it; the messages on it |
| `stub`, `pb_utils` | what runs in the process |
| `environments`, `stub_launcher` | Python environments that models bring; what starts `stub` in one |
| `content_cache` | folders on this machine that are made once and shared |
| `process_memory`, `stub_memory` | tensors in shared memory, seen from the worker and from the process |
| `loaded`, `warmup` | a model that is served; the requests that warm it up before |
| `models`, `engine` | loading, unloading and their order; the engine that the serving loop sees |
| `control` | the verbs `repository_load` and `repository_unload`, polling, and what is registered |
"""
