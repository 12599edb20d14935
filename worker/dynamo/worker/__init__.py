"""The worker: loads models and serves them over NATS to every frontend of its namespace.

| module | holds |
|---|---|
| `app` | the process from start to end; `serve_worker`, `serve_fleet`, `open_worker` serve engines from a program of one's own |
| `config` | `WorkerConfig` |
| `serve` | what is done with each request, written once for all engines |
| `engine.batching` | dynamic batching for tensor models |
| `triton_metrics` | these under Triton's names, for Prometheus |
| `statistics` | counts and durations per model version, for Triton's `ModelStatistics` |
| `metrics`, `spans`, `status` | the same for Prometheus, for traces, and the port that shows it |
| `request_record` | counts each request in all three, once |
| `canary` | whether an engine still makes progress |
| `engine.base` | what an engine is |
| `engines` | which engine a `--model` means |
| `engine.python` | models written as Python classes; `engine.declaration` and `engine.user_class` are parts of it |
| `engine.echo` | returns its input |
| `engine.llama` | llama.cpp; `engine.llama_request`, `llama_stream` and `llama_cache` are parts of it |
| `engine.vllm` | vLLM; `engine.vllm_request` is part of it, `kv.vllm_subscriber` and `kv.vllm_events` read its KV events |
| `engine.sglang` | SGLang; it shares requests and responses with `engine.remote` |
| `engine.sim` | a simulated engine: schedules and caches like a real one |
| `repository` | Triton model repositories: ONNX, Python-backend models and ensembles, loaded and unloaded at run time |
"""
