"""Builds the parts of a frontend from its configuration and connects them; `app` decides in which order they start and end.

| module | builds |
|---|---|
| `links` | the connections that are made so far |
| `metrics` | the registry, and what is measured at intervals |
| `http` | the operations of the HTTP port, and its server |
| `grpc` | the services of the gRPC port, and its server |
| `routing` | the router of the chosen mode, and what it follows |
| `plane` | the connections, the router and the data plane |
"""
