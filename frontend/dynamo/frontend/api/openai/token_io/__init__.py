"""Tokens in, tokens out, as `vllm serve` has them: generation, and what turns requests into tokens and tokens into responses.

| module | holds |
|---|---|
| `derender` | POST /v1/chat/completions/derender and /v1/completions/derender: tokens to responses |
| `generate` | POST /inference/v1/generate: continue tokens |
| `objects` | request and response bodies |
| `operations` | the operations |
| `render` | POST /v1/chat/completions/render and /v1/completions/render: requests to tokens |
"""
