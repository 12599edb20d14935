"""Tensors of KServe v2, and the protobuf messages that carry them.

| module | holds |
|---|---|
| `check` | checks of tensor requests against a model card, in the order and the words of Triton |
| `classification` | the classification extension: an output as the highest values of each row, by text |
| `known_heads` | heads of tensor requests that came before, which clients repeat |
| `message_json` | messages of the protocol as JSON objects, as Triton writes them |
| `message_limits` | limits on the fields of protobuf messages, checked before anything is parsed |
| `protobuf_wire` | the few parts of protobuf's wire format that are handled by hand |
| `relay` | requests that a model gets as HTTP has them, such as audio and images |
| `request` | parsing and building of requests and responses without copying their tensor data |
| `response` | responses of engines in the form that their requests want |
| `tensors` | tensors as KServe v2 sends them, and as numpy arrays |
"""
