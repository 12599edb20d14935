"""Reads what requests want, compiles it and tells what came of it: one line of JSON each, for as long as there are some.

What llama.cpp does with a grammar later holds up all its slots, so the first mask is computed here, too, over the vocabulary of
single bytes: automata depend on the bytes and not on the tokens made of them.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.worker.engine.llama.grammars.compiler import MAX_CPU_S, MAX_MEMORY_BYTES, Compiled, Wanted
from dynamo.worker.engine.llama.grammars.walks import walk_rules
from dynamo.worker.engine.llama.request import to_grammar


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = sys.stdout.buffer
    for line in sys.stdin.buffer:
        # Its signal ends the process. A limit on resources would do that after up to a second more: it counts whole seconds.
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            guided = msgspec.json.decode(line, type=Wanted).guided
            compiled = Compiled(grammar=to_grammar(guided))
            if "grammar" in guided:
                walk_rules(compiled.grammar)
        except InvalidRequest as error:
            compiled = Compiled(problem=str(error), param=error.param)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        output.write(msgspec.json.encode(compiled) + b"\n")
        output.flush()


main()
