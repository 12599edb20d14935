"""A language model in a GGUF file, run by llama.cpp inside this process.

| module | holds |
|---|---|
| `cache` | a mirror of llama.cpp's prefix cache, as far as it can be derived from outside |
| `engine` | `LlamaEngine` |
| `grammars` | grammars compiled in a process of their own |
| `request` | translates a request for text generation to the options of llama.cpp's server |
| `stream` | from the chunks that llama.cpp's server streams to token ids |
"""
