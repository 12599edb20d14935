"""Tries what a grammar costs while text is generated, which its compilation does not show.

An Earley parser takes a time per byte that grows with the square of the text's length where a rule may be split in many ways
(`s ::= s s | "a"`): after some hundred bytes llama.cpp would compute one mask for a second, in which no slot gets a token.
So each rule is followed for some bytes, by a text that repeats a byte and by a random one, and for more where these took long.
Nothing is decided here: the kernel ends the process that needs more CPU time than a grammar may. A grammar may hide such a rule
behind words that are long, or letters that are rare; it costs the less then, the longer or rarer they are.
"""

from __future__ import annotations

import re
import time
from random import Random
from typing import Any

from dynamo.worker.engine.llama.request import byte_matcher

FIRST_BYTES, ALL_BYTES = 128, 448
"""Two adjacent recursions take 24 ms and 2.5 s for these, an operator between two expressions 2 and 100 ms."""
CHEAP_S = 0.004
"""CPU time up to which the first bytes count as cheap (measured with llguidance 1.9.1 on 2026-11-25)."""
_RULE = re.compile(r"^[?!]?([a-z_]\w*)(?:\[[^]\n]*\])?(?:\.\d+)?\s*:", re.MULTILINE)
_START = re.compile(r"\bstart\b")
_ALLOWED = b"\xc8"
"""In what `compute_logit_bias` returns for each token."""


def walk_rules(grammar: str) -> None:
    """Follow each rule of a grammar of llguidance that compiles."""
    # A text in quotes may be renamed along with the rule: it costs as much.
    renamed = _START.sub("start_of_all", grammar)
    random = Random(grammar)
    for rule in _RULE.findall(renamed):
        matcher = byte_matcher(f"{renamed}\nstart: {rule}\n")
        for repeats in (True, False):
            began_s = time.process_time()
            last = _walk(matcher, FIRST_BYTES, -1, repeats, random)
            if time.process_time() - began_s > CHEAP_S:
                _walk(matcher, ALL_BYTES - FIRST_BYTES, last, repeats, random)
            matcher.reset()


def _walk(matcher: Any, count: int, last: int, repeats: bool, random: Random) -> int:
    """Consume at most `count` bytes, after `last`; return the last one."""
    for _ in range(count):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = matcher.compute_logit_bias()[:256]
        if not (repeats and allowed[last : last + 1] == _ALLOWED):
            last = allowed.find(_ALLOWED, random.randrange(256))
            if last < 0:
                last = allowed.find(_ALLOWED)
        if last < 0:
            break
        matcher.consume_token(last)
    return last
