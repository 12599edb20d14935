"""The frontend: takes requests of every protocol and sends each to an instance that serves its model.

| module | holds |
|---|---|
| `api` | one thin translation per protocol, and what they share |
| `app` | the process from start to end; `serve_frontend` serves from a program of one's own |
| `config` | every option |
| `fleet` | what this process knows of the others |
| `grafana` | dashboards and provisioning files, written into a folder when a frontend starts |
| `metrics` | `dynamo_frontend_*` |
| `names` | names of operators for models |
| `port_metrics` | what the ports say of their connections and gRPC calls |
| `preprocess` | text to token ids and back, tool calls and reasoning |
| `processes` | several frontend processes on the same ports |
| `router` | which instance gets a request: plain computation |
| `security` | API keys, accounts, surfaces |
| `router_metrics` | what routers report, counted in `dynamo_frontend_router_*` |
| `serving` | the data plane: what every protocol calls |
| `wiring` | builds the parts of a frontend and connects them |
"""
