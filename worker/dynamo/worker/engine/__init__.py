"""Engines: `base` says what the serving loop requires of one; each other module or folder is one, or shared by several.

| module | holds |
|---|---|
| `base` | what the serving loop requires of an engine |
| `batching` | dynamic batching: requests that arrive close together run as one execution |
| `batching_settings` | the options of dynamic batching: read, checked and completed |
| `declaration` | what a tensor model takes and gives, as one `Declaration` |
| `echo` | engines that return their input, for conformance tests and benchmarks |
| `llama` | llama.cpp, in this process |
| `open_requests` | what engines share that leave scheduling to another engine |
| `python` | a model written as a Python class |
| `python_text` | a language model written as a Python class |
| `remote` | engine servers that run elsewhere |
| `request_queue` | the queue of requests of one model: priority levels with timeouts and sizes |
| `sampling` | settings of sampling, as engines and engine servers take them |
| `sglang` | SGLang, driven from this process |
| `sim` | a simulated engine |
| `text_prompt` | what engines share that take text |
| `user_class` | a user's class |
| `vllm` | vLLM, driven from this process |
"""
