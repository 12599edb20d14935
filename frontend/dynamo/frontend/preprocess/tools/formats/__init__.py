"""The formats of tool calls that need code of their own. Others are a row each in `dynamo.frontend.preprocess.parser_registry`.

| module | holds |
|---|---|
| `deepseek` | DeepSeek V3, R1 and V3.1 |
| `generic` | any usual form of a JSON call, of models whose chat template has no tools |
| `harmony` | the channels of gpt-oss |
| `kimi` | Kimi K2 |
| `llama3_json` | Llama 3 |
| `mistral` | Mistral |
| `pythonic` | Llama 3.2 and 4, LFM 2 and others |
"""
