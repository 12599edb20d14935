"""When the requests of a model run: batches, sequences, order, rates.

| module | holds |
|---|---|
| `batches` | dynamic batching: the requests of a model in batches, and the responses in order |
| `decoupled` | a request of a decoupled model on its way |
| `pipeline` | the requests of one model on their way through its processes |
| `rate_limiter` | resources that the models of a worker share, as in Triton's rate limiter |
| `response_order` | the order of responses with `preserve_ordering` |
| `responses` | the responses of a model's process to one request |
| `sequence_request` | a request of a sequence, and where its outcome comes |
| `sequences` | sequence batching: the requests of one sequence run in order, on one instance |
"""
