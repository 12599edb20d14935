"""Requests to instances, and to other ones when that is safe.

| module | holds |
|---|---|
| `booking` | requests at instances: picked, booked and opened in one synchronous step |
| `candidates` | the instances that a request can be sent to now |
| `circuits` | circuit breakers: instances that fail too many requests get none for a while |
| `disaggregation` | one instance computes the prompt, another one generates the response |
| `dispatched_stream` | one request at an instance, and at another one where `retry` says that it is safe |
| `dispatcher` | opens requests at instances |
| `parts` | what all requests of a process are dispatched with |
| `prefix_reuse` | how much of the prompts each instance had cached |
| `retry` | what follows a failed attempt: a decision without I/O, and a budget for each model and API key |
"""
