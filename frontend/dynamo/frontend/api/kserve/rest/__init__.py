"""KServe v2 over HTTP, with Triton's extensions of it.

paths      which resource a URL names
bodies     compression, and the border between JSON and binary tensors
requests   a request's JSON and binary tensors → the ModelInferRequest that gRPC would carry
elements   a tensor's `data` in JSON ↔ its raw form
answers    a ModelInferResponse → JSON and binary tensors
infer, generate, repository, routes   the handlers
operations   what /openapi.json says of all this
"""
