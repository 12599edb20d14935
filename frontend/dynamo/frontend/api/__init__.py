"""The protocols: one folder for each, which do not know one another, and what they share.

| module | holds |
|---|---|
| `anthropic` | the Anthropic API |
| `calls` | from gRPC metadata or HTTP headers to the conditions of a call |
| `capacity` | what all requests of this process together may occupy |
| `console` | one page about the fleet |
| `declaration` | what an operation declares, whichever protocol it is called by |
| `guard` | authentication and authorization by keys, scopes and restrictions, and the audit log |
| `health` | whether this process can serve |
| `http` | what protocols over HTTP share: the server, its operations, an exchange |
| `kserve` | KServe v2 with Triton's extensions, over gRPC and, in `rest`, HTTP |
| `openai` | the OpenAI API, and what `vllm serve` adds to it |
| `operations` | the HTTP operations that need the data plane alone |
| `picker` | the endpoint picker of gateways: Envoy's external processing |
| `rpc` | what protocols over gRPC share: the servers and their operations |
| `statuses` | the one table from errors to the statuses of gRPC and HTTP |
| `text` | the rules of text requests, whatever their protocol |
"""
