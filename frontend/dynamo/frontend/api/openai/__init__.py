"""The OpenAI API, and what `vllm serve` adds to it.

| module | holds |
|---|---|
| `batches` | files and batches |
| `chat` | POST /v1/chat/completions |
| `chat_batch` | POST /v1/chat/completions/batch: several conversations in one request |
| `chunks` | write streamed responses as server-sent events |
| `completions` | POST /v1/completions |
| `custom_tools` | tools whose input is a text, which are functions to the model |
| `edge` | what the endpoints share: the data plane, limits, streaming, and NVIDIA's extension `nvext` |
| `field_names` | the names of fields in errors, where a request is served in terms of another one |
| `invocations` | POST /invocations: requests of all kinds at one path |
| `logprobs` | log probabilities in the forms of OpenAI's API |
| `media` | audio and images, which pass through to models that have them |
| `operations` | the operations of the OpenAI API and the tokenizer endpoints |
| `pooling` | embeddings, rerank, score, classify, pooling: numbers for texts |
| `requests` | request bodies |
| `response_objects` | response bodies |
| `responses` | the Responses API and conversations |
| `store` | responses, conversations and events that are stored, and the quota of each key |
| `to_text` | translate requests of the OpenAI API into text requests |
| `token_io` | tokens in, tokens out: generation, and rendering of requests and responses |
| `tokens` | POST /tokenize and /detokenize, in the form of vLLM's API |
| `whole` | whole responses, whose choices may be long together |
"""
