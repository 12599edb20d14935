"""Translates a request for text generation to the options of llama.cpp's server.

llama.cpp takes nearly any number and ignores a grammar that it cannot compile, so both are checked here, before it sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, Sampling
from dynamo.common.generation_rules import Feature, check_features

MAX_LOGPROBS = 128
MAX_CHOICES = 64
MAX_LOGIT_BIASES = 4096
MAX_GRAMMAR_BYTES = 256 << 10
MAX_GRAMMAR_RULES = 256
"""Rules of a grammar, references in a schema. llguidance follows them recursively; some 800 in a row crash the process."""

LONGEST_CHARACTER_TOKENS = 4
"""A character of four bytes is four tokens at most."""

SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
"""In the order in which most servers apply them; llama.cpp's own puts temperature last."""

_SUPPORTED = frozenset({Feature.GUIDED, Feature.LOGIT_BIAS, Feature.BAD_WORDS})
"""Not `cache_salt`: other requests would have to be kept away from the cached prompt."""

Options = Mapping[str, object]


def check_request(request: GenerateRequest, *, vocabulary_size: int, context_length: int) -> None:
    """Raises InvalidRequest for a request that llama.cpp could not run, or would run wrongly without an error."""
    prompt = request.tokens
    if not prompt:
        raise InvalidRequest("the prompt has no tokens")
    if len(prompt) >= context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, which leaves no room for output in a context of {context_length} tokens"
        )
    if (greatest := max(prompt)) >= vocabulary_size:
        raise InvalidRequest(f"the prompt has token {greatest}, but the model has {vocabulary_size} tokens")
    _between("n", request.n, 1, MAX_CHOICES)
    _between("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _between("max_tokens", request.stop.max_tokens, 0, None)
    _between("min_tokens", request.stop.min_tokens, 0, context_length)
    _between("data_parallel_rank", request.data_parallel_rank, 0, 0)
    _check_sampling(request.sampling, vocabulary_size)
    check_features(request, "llama", _SUPPORTED)
    if request.stop.min_tokens and request.sampling.guided:
        raise InvalidRequest(
            "min_tokens together with structured output is not supported by the llama engine", param="min_tokens"
        )


def _check_sampling(sampling: Sampling, vocabulary_size: int) -> None:
    _between("temperature", sampling.temperature, 0, 100)
    _between("top_p", sampling.top_p, 0, 1)
    _between("top_k", sampling.top_k, -1, None)
    _between("min_p", sampling.min_p, 0, 1)
    _between("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _between("presence_penalty", sampling.presence_penalty, -2, 2)
    _between("repetition_penalty", sampling.repetition_penalty, 0, 100)
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise InvalidRequest("top_p and repetition_penalty must be above 0")
    biases, words = sampling.logit_bias or {}, sampling.bad_words_token_ids or ()
    if len(biases) + len(words) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"more than {MAX_LOGIT_BIASES} tokens have a bias", param="logit_bias")
    for token, bias in biases.items():
        _between("a token of logit_bias", token, 0, vocabulary_size - 1)
        _between("logit_bias", bias, -100, 100)
    for word in words:
        if len(word) != 1:
            raise InvalidRequest("bad words of more than one token are not supported by the llama engine", param="bad_words")
        _between("a token of bad_words", word[0], 0, vocabulary_size - 1)


def _between(name: str, value: float | None, least: float, most: float | None) -> None:
    if value is None or (isfinite(value) and least <= value and (most is None or value <= most)):
        return
    bounds = f"{least} or more" if most is None else f"{least}" if least == most else f"between {least} and {most}"
    raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)


def sampling_options(
    request: GenerateRequest, index: int, *, context_length: int, grammar: str | None = None
) -> dict[str, object]:
    """Return the sampling options of choice `index`. Unset ones are the model's, or llama.cpp's own.

    `grammar` is what `to_grammar` made of the request's structured output.
    """
    sampling = request.sampling
    named = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repeat_penalty": sampling.repetition_penalty,
        # 2**32 - 1 would mean a random one
        "seed": None if sampling.seed is None else (sampling.seed + index) % (2**32 - 1),
        "grammar": grammar,
    }
    options: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    if sampling.temperature == 0:
        options["top_k"] = 1  # the same token, without sorting the vocabulary
    return {
        **options,
        "stream": True,
        "return_progress": True,  # so that a long prompt can be given up between two batches
        "timings_per_token": True,
        "n_probs": 1 + (request.logprobs or 0),  # a chunk names its token only with probabilities
        "repeat_last_n": context_length,  # penalties look at all tokens, those of the prompt too
        "samplers": SAMPLERS,
    }


def pass_options(request: GenerateRequest, prompt: Sequence[int], *, limit: int, forbid_stop: bool = False) -> dict[str, object]:
    """Return the options to generate up to `limit` tokens from `prompt`; with `forbid_stop`, no token ends the generation."""
    bias: list[tuple[int, float | bool]] = list((request.sampling.logit_bias or {}).items())
    bias += [(word[0], False) for word in request.sampling.bad_words_token_ids or ()]  # False: never
    if forbid_stop:
        bias += [(token, False) for token in request.stop.token_ids]
    return {
        "prompt": prompt,
        "ignore_eos": forbid_stop or request.stop.ignore_eos,
        "logit_bias": bias,
        # Tokens inside a character are reported only when it is complete: without these more, the last ones never would be.
        "max_tokens": limit + LONGEST_CHARACTER_TOKENS - 1,
    }


def to_grammar(guided: Mapping[str, Any]) -> str:
    """Return the llguidance grammar of `Sampling.guided`, which compiles. Raises InvalidRequest.

    What compiling takes is not bounded here: the worker calls it in a process of its own (`grammars`).

    GBNF is translated. llama.cpp's own parser recurses without a bound, so that a request could crash the process, and its
    matcher takes exponential time for ambiguous grammars (`"a"? "a"? "a"? …`), during which no slot gets a token.
    """
    chosen = [(kind, value) for kind, value in guided.items() if value not in (None, False)]
    if len(chosen) != 1:
        raise InvalidRequest("guided decoding takes exactly one of json_schema, json_object, regex, choice and grammar")
    [(kind, value)] = chosen
    match kind, value:
        case "json_object", True:
            return _json_grammar({"type": "object"})
        case "json_schema", dict() | bool() | str():
            return _compiled(_json_grammar(_parse_schema(value) if isinstance(value, str) else value), kind)
        case "regex", str():
            return _compiled(f"%llguidance {{}}\nstart: /{_in_slashes(value)}/", kind)
        case "choice", [_, *_] if all(isinstance(choice, str) and choice for choice in value):
            return _compiled(_from_gbnf("root ::= " + " | ".join(_quoted(choice) for choice in value), kind), kind)
        case "grammar", str():
            return _compiled(_own(value) if value.startswith("%llguidance") else _from_gbnf(value, kind), kind)
        case _:
            raise InvalidRequest(f"guided decoding cannot use this value of '{kind:.40}'", param=f"{kind:.40}")


def _parse_schema(text: str) -> dict[str, Any] | bool:
    try:
        return msgspec.json.decode(text, type=dict[str, Any] | bool)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not a JSON schema: {error}", param="json_schema") from error


def _json_grammar(schema: dict[str, Any] | bool) -> str:
    # With free whitespace small models fill their output with line breaks.
    narrowed = {"x-guidance": {"whitespace_flexible": False}, **schema} if isinstance(schema, dict) else schema
    try:
        return f"%llguidance {{}}\nstart: %json {msgspec.json.encode(narrowed).decode()}"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not a JSON schema: {error}", param="json_schema") from error


def _bounded(grammar: str, kind: str) -> str:
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{kind} is longer than {MAX_GRAMMAR_BYTES} bytes", param=kind)
    return grammar


def _own(grammar: str) -> str:
    """Check a grammar that is written for llguidance."""
    if "%json" in grammar:  # a text in which references could be spelled in ways that cannot be counted
        raise InvalidRequest("a schema inside a grammar is not taken: give it as json_schema", param="grammar")
    return grammar


def _from_gbnf(grammar: str, kind: str) -> str:
    _bounded(grammar, kind)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{kind} needs the package llguidance: install dynamo-serving[llama]", param=kind) from error
    try:
        translated: str = gbnf_to_lark(grammar)
    except Exception as error:  # plain exceptions; RecursionError if it is nested too deeply
        raise InvalidRequest(f"{kind} cannot be used: {str(error)[:500]}", param=kind) from error
    return translated


def _compiled(grammar: str, kind: str) -> str:
    _bounded(grammar, kind)
    if max(grammar.count("\n"), grammar.count("\r"), grammar.count('"$ref"')) > MAX_GRAMMAR_RULES:
        raise InvalidRequest(f"{kind} has more than {MAX_GRAMMAR_RULES} rules or references", param=kind)
    try:
        matcher = byte_matcher(grammar)
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{kind} needs the package llguidance: install dynamo-serving[llama]", param=kind) from error
    if not matcher.is_error():
        matcher.compute_bitmask()  # much is computed only now
    if problem := matcher.get_error():
        [first, *_] = problem.splitlines()
        raise InvalidRequest(f"{kind} cannot be used: {first[:500]}", param=kind)
    return grammar


def byte_matcher(grammar: str) -> Any:
    """Return an `llguidance.LLMatcher` of the grammar over the vocabulary of single bytes. Raises ModuleNotFoundError."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    return LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar, log_level=0)


class _Bytes:
    """The vocabulary of single bytes, in the form that llguidance takes."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _in_slashes(regex: str) -> str:
    """Escape `regex` so that it can stand between two slashes."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return escaped.replace("\r", r"\r").replace("\n", r"\n")


def _quoted(text: str) -> str:
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return '"' + "".join(escapes.get(character, character) for character in text) + '"'
