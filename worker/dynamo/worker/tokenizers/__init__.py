"""Tokenizers in the files of models.

| module | holds |
|---|---|
| `folder` | what a model's folder, as Hugging Face has them, says about text |
| `gguf` | the header of a GGUF file: metadata, tokenizer, chat template |
| `hugging_face` | files of a tokenizer that an engine has loaded by the library transformers |
| `sentencepiece` | a SentencePiece model as a `tokenizer.json` |
"""
