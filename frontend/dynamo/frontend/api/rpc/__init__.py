"""What protocols over gRPC share: two exchangeable servers, and the wrappers around all operations.

| module | holds |
|---|---|
| `bounded` | what calls declare, and the capacity of the process |
| `guard` | authentication, authorization and audit of calls |
| `handlers` | handlers of calls |
| `health` | the standard services that gRPC tools expect |
| `http2` | this project's gRPC server |
| `metered` | the metrics `grpc_server_*` |
| `operation` | an operation: one method of a service, with everything the servers derive from it |
| `server` | a gRPC port, served by one of two exchangeable servers |
| `streams` | reading the requests of bidirectional calls, interruptible by a shutdown |
| `watches` | watches of health: one timer for all, and bounds |
"""
