"""vLLM, driven from this process.

| module | holds |
|---|---|
| `engine` | `VllmEngine`, `SharedVllm` |
| `ranks` | what the data-parallel ranks of one vLLM share |
| `speech` | `VllmSpeech`: speech models, as a relay of vLLM's own endpoints |
| `request` | translates requests for text generation to vLLM's terms, and vLLM's outputs to ours |
"""
