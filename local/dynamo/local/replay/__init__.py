"""`dynamo-local replay`: a trace of requests against a simulated fleet in virtual time, for several router modes side by side."""
