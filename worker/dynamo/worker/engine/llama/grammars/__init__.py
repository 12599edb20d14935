"""Grammars compiled in a process of their own, which may be killed.

| module | holds |
|---|---|
| `__main__` | the process: compiles as llama.cpp will, within bounds of CPU time and memory |
| `compiler` | in the worker: hands over what a request wants, ends the process that takes too much |
| `memory` | in the worker: what was compiled or refused lately |
| `turns` | in the worker: one grammar at a time, in turns between API keys |
| `walks` | what a grammar costs while text is generated, tried in that process |
"""
