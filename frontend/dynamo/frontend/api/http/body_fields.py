"""Fields of a request's body that are changed on the way to its endpoint: the model's name there, and a salt for its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
Values: TypeAlias = Mapping[str, msgspec.Raw]

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_TRANSFERS = frozenset(
    {"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
)
"""Fields of vLLM, TensorRT-LLM and SGLang."""
_ADAPTERS = frozenset({"lora_path", "lora_request", "lora"})
"""Fields of SGLang, TensorRT-LLM and llama.cpp."""

_GUIDES = frozenset(
    {
        *("response_format", "structured_outputs", "structural_tag", "json_schema", "regex", "grammar", "ebnf", "text"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_config", "output_format"),
    }
)
"""Fields by which engine servers, of any kind and any API, take schemas and grammars."""
_TEXTS = frozenset({"response_format", "text"})
"""Fields that are something else if they are a string: the format of a picture, what is to be classified."""


class _Fields(msgspec.Struct):
    model: str | None = None


class _Salted(msgspec.Struct):
    cache_salt: str | None = None


_fields_decoder = msgspec.json.Decoder(_Fields)
_salted_decoder = msgspec.json.Decoder(_Salted)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


def model_in(body: bytes) -> str:
    """Return the model that a body names; an empty string if it names none, or is not JSON."""
    fields = _decoded(_fields_decoder, body)
    return "" if fields is None else fields.model or ""


def cache_salt_in(body: bytes) -> str:
    """Return the salt for cached prompts that a body names; an empty string if it names none, or is not JSON."""
    fields = _decoded(_salted_decoder, body)
    return "" if fields is None else fields.cache_salt or ""


def values_in(body: bytes) -> Values | None:
    """Return the fields of a JSON object, as their text; None if the body is none."""
    return _decoded(_objects, body)


def is_harmless(values: Values, *, with_tools: bool) -> bool:
    """Return whether by these fields, as every parser reads them, no engine fetches caches from elsewhere or compiles a grammar.

    `with_tools`: whether what an engine does with these fields may have it compile the schemas of tools.
    """
    guides = _GUIDES | {"tools"} if with_tools else _GUIDES
    said = {name for name in guides.intersection(values) if bytes(values[name]) != b"null"}
    return _TRANSFERS.isdisjoint(values) and all(name in _TEXTS and bytes(values[name])[:1] == b'"' for name in said)


def asks_for_one(values: Values) -> bool:
    """Return whether these fields ask for one choice of one prompt: text, or token ids."""
    choices = (bytes(values[name]) for name in ("n", "best_of") if name in values)
    lists = (bytes(values[name])[1:].lstrip() for name in ("prompt", "prompt_embeds") if bytes(values.get(name, b""))[:1] == b"[")
    return all(each in (b"1", b"null") for each in choices) and all(each[:1].isdigit() for each in lists)


def beyond_rights(values: Values, *, adapters: bool, priorities: bool) -> str:
    """Return a field by which an engine fetches caches from elsewhere, with `adapters` computes an adapter, or with `priorities`
    takes another request's turn: to some engines a low number is urgent, to others a high one.

    An empty string if there is none but null ones and a priority of 0.
    """
    names = _TRANSFERS | (_ADAPTERS if adapters else set()) | ({"priority"} if priorities else set())
    said = {name for name in names.intersection(values) if bytes(values[name]) != b"null"}
    return min(said - ({"priority"} if bytes(values.get("priority", b"")) == b"0" else set()), default="")


def changed_body(body: bytes, *, model: str, cache_salt: str = "") -> bytes | None:
    """Return a JSON object with these fields; None if it has them already, or cannot be read. An empty value changes nothing.

    The other fields keep their text: they are not decoded.
    """
    try:
        values = _objects.decode(body)
        wanted = {"model": model, "cache_salt": cache_salt}
        changes = {name: value for name, value in wanted.items() if value and value != _text(values.get(name))}
    except _UNREADABLE:
        return None
    return _encode(values, changes) if changes else None


def rewritten_body(body: bytes, **changes: str) -> bytes:
    """Return a JSON object with these fields, and with each other one once: the last of its name.

    The other fields keep their text: they are not decoded. Raises DecodeError for a body that is no object.
    """
    return _encode(_objects.decode(body), changes)


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T | None:
    try:
        return decoder.decode(body)
    except _UNREADABLE:
        return None


def _encode(values: dict[str, msgspec.Raw], changes: dict[str, str]) -> bytes:
    return msgspec.json.encode({**values, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changes.items()}})


def _text(value: msgspec.Raw | None) -> str | None:
    """Return a field's value. Raises ValidationError for one that is not a string."""
    return None if value is None else msgspec.json.decode(value, type=str | None)
