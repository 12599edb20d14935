"""KServe v2 over HTTP, with Triton's extensions of it.

paths      a URL → the resource it names
bodies     compression, and the boundary between JSON and binary tensors
requests   a request's JSON and binary tensors → the ModelInferRequest that gRPC would carry
elements   a tensor's `data` in JSON ↔ its raw form
long_arrays, long_strings, long_tensors   the same for what is long, in steps
responses  a ModelInferResponse → JSON and binary tensors
infer, generate, repository, handlers   the handlers
operations   the operations in /openapi.json
"""
