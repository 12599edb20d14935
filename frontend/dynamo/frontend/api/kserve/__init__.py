"""KServe v2 with Triton's extensions, over gRPC; `rest` has it over HTTP.

| module | holds |
|---|---|
| `declarations` | what the operations of KServe v2 declare, over gRPC and HTTP alike |
| `infer` | inference with a single response, from parsed request to serialized response |
| `messages` | KServe messages about the server and its models, made from model cards |
| `model_files` | the files in a RepositoryModelLoadRequest, which stay where they arrived |
| `placed` | requests whose inputs or outputs are in shared memory of clients |
| `regions` | system shared memory that clients on this host register |
| `registrations` | which regions of shared memory are registered |
| `repository_requests` | the parameters of RepositoryModelLoad and RepositoryModelUnload, over gRPC and REST |
| `rest` | KServe v2 over HTTP |
| `server` | what the gRPC and the REST side of KServe v2 share in one process |
| `service` | every call of `inference.GRPCInferenceService`, from bytes to bytes |
| `settings` | trace and log settings over the protocol |
| `stream` | ModelStreamInfer |
| `text` | requests to language models over KServe tensors |
| `text_responses` | their responses |
| `words` | errors in the words of Triton, which its clients and their tests look for |
"""
