"""A model on an engine server that runs elsewhere: vLLM, SGLang, TensorRT-LLM, or any that speaks OpenAI's API.

| module | holds |
|---|---|
| `adapters` | LoRA adapters that an engine server loads and unloads while it runs, by its own calls |
| `completions` | `/v1/completions` with token ids in both directions |
| `conversations` | conversations over WebSockets with a server of the kind `relay` |
| `dialect` | what the remote engine requires of the protocol of a kind of engine server |
| `engine` | `RemoteEngine`: what all kinds of servers share |
| `errors` | errors of engine servers as errors of ours |
| `gateway` | where gateways reach an engine server |
| `load` | the load of an engine server, from its `/metrics` |
| `models` | which models an engine server has, once it is up |
| `options` | the options of the remote engine |
| `relay` | models of audio and images, whose requests and responses pass through |
| `samples` | the samples on a page of metrics of an engine server |
| `servers` | engine servers that a file lists |
| `sglang` | SGLang's own `/generate`, with token ids in both directions |
| `text` | chat and text completions as any server has them |
| `tiers` | what the tiers of a vLLM server's cache did, from its `/metrics` |
| `tokens` | what the protocols have in common that take token ids and send them |
"""
