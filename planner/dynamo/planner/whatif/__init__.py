"""What another number of instances would do to the arrivals of the last minutes: tried with the real router, in virtual time.

| module | holds |
|---|---|
| `advisor` | which numbers are tried when, and what follows from it |
| `background` | searches in a thread of their own |
| `engine` | an engine as far as latencies depend on it, in few events per request |
| `fleet` | a fleet of these behind a router |
| `strides` | the hashes of sampled prompts at one stride |
"""
