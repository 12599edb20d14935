"""The worker: loads models and serves them over NATS to every frontend of its namespace.

| module | holds |
|---|---|
| `app` | the process from start to end; `serve_worker`, `serve_fleet`, `open_worker` serve engines from a program of one's own |
| `canary` | whether an engine still makes progress |
| `compat` | runs workers written for NVIDIA Dynamo |
| `config` | every option: `WorkerConfig` |
| `engine` | `base` (the protocols), and one module or folder per engine |
| `kv` | KV events of engines, read and translated |
| `observability` | metrics, statistics and traces of requests |
| `paths` | paths that others wrote and that must stay inside a model's folder |
| `process` | the parts of the process around the engines: registration, status, KV events, sleep |
| `repository` | Triton model repositories |
| `serve` | the serving loop: what is done with each request, written once for all engines |
| `tokenizers` | tokenizers in the files of models |
| `traces` | traces in Triton's JSON format |
"""
