"""Grammars compiled in a process of their own, which may be killed.

compiler   in the worker: hands over what a request wants, waits for the grammar, ends the process that takes too much
turns      in the worker: one grammar at a time, in turns between API keys
memory     in the worker: what was compiled or refused lately
walks      what a grammar costs while text is generated, tried in that process
__main__   the process: compiles as llama.cpp will, within bounds of CPU time and memory that the kernel keeps
"""
