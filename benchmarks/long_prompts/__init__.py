"""Prompts of 100,000 tokens beside short requests: `python -m benchmarks.long_prompts`.

| module | holds |
|---|---|
| `prompts` | the texts, and the requests made of them |
| `load` | requests at a fixed rate, over as many connections as that takes |
| `timed_frontend` | a frontend that records how late its event loop is |
| `turns` | the record of that, written there and read here |
| `steps` | what each step of a long prompt costs by itself |
"""
