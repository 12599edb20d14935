"""The formats in which models write tool calls, one file for each.

| module | holds |
|---|---|
| `deepseek` | DeepSeek V3, R1 and V3.1 |
| `deepseek_v32` | DeepSeek V3.2 |
| `generic` | any usual form of a JSON call, of models whose chat template has no tools |
| `glm` | GLM 4.5 and later |
| `granite` | Granite 3 |
| `harmony` | the channels of gpt-oss |
| `hermes` | Hermes, Qwen 2.5, Qwen 3, Granite 4 |
| `jamba` | Jamba, Hunyuan, MiniMax M1 |
| `kimi` | Kimi K2 |
| `llama3_json` | Llama 3 |
| `longcat` | LongCat Flash |
| `minimax` | MiniMax M2 |
| `mistral` | Mistral |
| `nemotron` | Nemotron until Nano 2 |
| `phi4` | Phi 4 |
| `pythonic` | Llama 3.2 and 4, LFM 2 and others |
| `qwen3_coder` | Qwen 3 Coder, Nemotron 3 |
| `seed_oss` | Seed OSS |
"""
