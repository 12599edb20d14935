"""What a worker counts, measures and traces of its requests.

| module | holds |
|---|---|
| `metrics` | `dynamo_component_*` |
| `request_record` | one request of a worker, counted once, and the phases of its time for what keeps it: |
| `request_trace` | its trace in Triton's format, with the tensors |
| `spans` | its span, with the phases as children |
| `statistics` | outcomes and times of the requests of each model version, for Triton's `ModelStatistics` |
| `triton_metrics` | `nv_inference_*`: the statistics under the names that Triton's dashboards use |
"""
