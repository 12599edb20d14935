"""Builds the parts of a frontend from its configuration and connects them; `app` decides in which order they start and end.

| module | holds |
|---|---|
| `grpc` | the gRPC port |
| `http` | the HTTP port |
| `metrics` | the metrics of a frontend process |
| `parts` | what the ports share |
| `picker` | the port of the endpoint picker |
| `plane` | the data plane and what it stands on |
| `routing` | the router |
"""
