"""What a worker counts, measures and traces of its requests.

| module | holds |
|---|---|
| `metrics` | `dynamo_component_*` |
| `request_record` | one request of a worker, counted once |
| `request_trace` | what is traced of one request to one model, in Triton's format |
| `spans` | the parts of a request's time, as children of its span |
| `statistics` | outcomes and times of the requests of each model version, for Triton's `ModelStatistics` |
| `triton_metrics` | `nv_inference_*`: the statistics under the names that Triton's dashboards use |
"""
