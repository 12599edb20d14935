"""Metrics, traces, and the log and trace settings that clients change at run time.

| module | holds |
|---|---|
| `log_settings` | log settings that clients change at run time |
| `reception` | when a frontend received a request, for the trace files of workers on its host |
| `scrape` | the text that Prometheus reads, rendered beside the event loop |
| `server_settings` | the document in which all processes of a namespace share them |
| `tally` | counters that cost a hot path one addition |
| `telemetry` | what the metrics of both processes share, under metric names that existing dashboards use |
| `tracing` | traces |
"""
