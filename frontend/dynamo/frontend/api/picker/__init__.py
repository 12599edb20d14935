"""The endpoint picker: tells a gateway, by Envoy's external processing, where to send each of its requests.

A request of the gateway is run through the operation that the HTTP port has for its path, up to the step at which it would be
sent. No byte of a response comes here, unless the gateway sends it.

| module | holds |
|---|---|
| `gateway_request` | a request of a gateway, as the operations of HTTP take requests |
| `headers` | names of headers and metadata that gateways and pickers have agreed on, and what they mean |
| `messages` | messages to the gateway, serialized |
| `passing_on` | requests that no operation can place: to an endpoint with little load |
| `picking` | one request, from its headers to the endpoint that it is sent to, or to its refusal |
| `processing` | one call of the gateway: the messages about one request and its response |
| `service` | the gRPC service |
"""
