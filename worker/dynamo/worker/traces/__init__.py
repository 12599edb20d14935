"""Traces in Triton's JSON format, which clients switch on by trace settings.

    async with open_triton_traces(options, instance) as traces:     # one per worker
        traces.use(settings)                                        # again with each change
        trace = traces.begin(model, version, request_id)            # None: this request is not traced
        trace.timestamp("REQUEST_START", perf_counter_ns())
        trace.end()                                                 # a thread writes the files

A trace is one request to one model. Those of the models in an ensemble have its trace as their parent, and are written with it
as one group. Times are those of the monotonic clock, as in Triton.

| module | holds |
|---|---|
| `files` | the files of traces: one that grows, and numbered ones |
| `recorder` | which requests are traced, and when traces are written |
| `trace` | one trace, and how it is written |
"""
