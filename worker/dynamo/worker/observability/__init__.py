"""What a worker counts, measures and traces of its requests.

| module | holds |
|---|---|
| `metrics` | `dynamo_component_*` |
| `request_record` | one request of a worker, counted once, with the times of its phases |
| `request_trace` | the trace of a request in Triton's format, with the tensors |
| `spans` | the span of a request, with its phases as children |
| `statistics` | outcomes and times of the requests of each model version, for Triton's `ModelStatistics` |
| `triton_metrics` | `nv_inference_*`: the statistics under the names that Triton's dashboards use |
"""
