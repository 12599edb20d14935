"""Builds the parts of a frontend from its configuration and connects them; `app` decides in which order they start and end.

| module | holds |
|---|---|
| `grpc` | the gRPC port |
| `http` | the HTTP port |
| `links` | the connections of a frontend, as far as they are made |
| `metrics` | the metrics of a frontend process |
| `plane` | the data plane and what it stands on |
| `routing` | the router |
"""
