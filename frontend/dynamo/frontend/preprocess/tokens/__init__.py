"""Tokenizers, and token ids back to text.

| module | holds |
|---|---|
| `detokenize` | incremental detokenization: whole characters only |
| `fast_tokens` | fast tokenization with the library fastokens |
| `tokenizer` | a model's tokenizer |
| `tokenizer_file` | what the file of a tokenizer may ask of a frontend |
"""
