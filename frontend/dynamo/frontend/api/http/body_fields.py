"""Fields of a request's body that are changed on the way to its endpoint: the model's name there, and a salt for its cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any, TypeAlias, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.guided_rules import check_guided
from dynamo.frontend.preprocess.checks import check_variables

T = TypeVar("T")
Values: TypeAlias = Mapping[str, msgspec.Raw]

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_TRANSFERS = frozenset(
    {"kv_transfer_params", "ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
)
"""Fields of vLLM, TensorRT-LLM and SGLang."""
_CODE = frozenset({"custom_logit_processor", "logits_processors"})
"""Fields of SGLang and vLLM, which run code of a client where they are set up to."""
_FOREIGN = _TRANSFERS | _CODE
_ADAPTERS = frozenset({"lora_path", "lora_request", "lora"})
"""Fields of SGLang, TensorRT-LLM and llama.cpp."""

_GUIDES = frozenset(
    {
        *("response_format", "structured_outputs", "structural_tag", "json_schema", "regex", "grammar", "ebnf", "text"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "output_config", "output_format"),
    }
)
"""Fields by which engine servers, of any kind and any API, take schemas and grammars."""
PLAIN_GUIDES: Mapping[str, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Guides of SGLang and others that are nothing but one schema, pattern or grammar, with the kind of it."""
_TEXTS = frozenset({"response_format", "text"})
"""Fields that are something else if they are a string: the format of a picture, what is to be classified."""

_TEMPLATES = frozenset({"chat_template", "chat_template_kwargs"})

_PROCESSING = frozenset({"media_io_kwargs", "mm_processor_kwargs"})
"""Fields of vLLM: how media are made arrays, whatever their size, such as `{"min_pixels": 1000000000000}`."""

_ABSENT = msgspec.Raw()
_NULL = msgspec.Raw(b"null")
_FREE_CHOICES = frozenset({"auto", "none"})
_OTHERS = ("tools", "tool_choice", "n", "best_of", "prompt", "prompt_embeds", "messages", "priority", "cache_salt")
_READ = _FOREIGN | _ADAPTERS | _GUIDES | _TEMPLATES | _PROCESSING | {*_OTHERS}
_NESTED = (
    *("messages", "tools", "prompt", "input", "documents", "response_format", "text", "system", "instructions", "content"),
    *("inputs", "text_input", "query", "queries", "texts", "text_1", "text_2", "suffix", "chat_template", "metadata"),
)
"""Fields that may have many others, and texts with colons, in them."""
_MAX_FIELDS = 10_000


class _Fields(msgspec.Struct):
    model: str | None = None


class _Salted(msgspec.Struct):
    cache_salt: str | None = None


class _ToolFunction(msgspec.Struct):
    parameters: Any = None
    strict: bool | None = None


class _AnyTool(msgspec.Struct):
    """A tool as OpenAI's chats have it, the Responses API, or Anthropic's messages."""

    function: _ToolFunction | None = None
    parameters: Any = None
    input_schema: Any = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: str = ""


_fields_decoder = msgspec.json.Decoder(_Fields)
_salted_decoder = msgspec.json.Decoder(_Salted)
_texts_decoder = msgspec.json.Decoder(str)
_read_decoder = msgspec.json.Decoder(msgspec.defstruct("_Read", [(name, msgspec.Raw, _ABSENT) for name in sorted(_READ)]))
_nested_decoder = msgspec.json.Decoder(msgspec.defstruct("_Nested", [(name, msgspec.Raw, _ABSENT) for name in _NESTED]))
_variables_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_tools_decoder = msgspec.json.Decoder(list[_AnyTool] | None)
_choice_decoder = msgspec.json.Decoder(_ToolChoice | str | None)
_switches_decoder = msgspec.json.Decoder(dict[str, bool])
_any_decoder = msgspec.json.Decoder()
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
    """Return the fields of a JSON object that the functions below look at, as their text; None if the body is none."""
    read = _decoded(_read_decoder, body)
    return None if read is None else {name: value for name, value in msgspec.structs.asdict(read).items() if value is not _ABSENT}


def check_fields(body: bytes) -> None:
    """Raise PayloadTooLarge for a JSON object of so many fields that writing it anew would take the event loop for long.

    Each takes 2 us, and a body of 4 MiB may have 300,000.
    """
    marks = body.count(b":")
    if marks <= _MAX_FIELDS or (nested := _decoded(_nested_decoder, body)) is None:
        return
    if marks - sum(bytes(value).count(b":") for value in msgspec.structs.astuple(nested)) > _MAX_FIELDS:
        raise PayloadTooLarge(f"the body has more than {_MAX_FIELDS} fields")


def said_in(values: Values, names: Set[str]) -> set[str]:
    """Return those of the fields that are there and not null."""
    return {name for name in names & values.keys() if bytes(values[name]) != b"null"}


def is_harmless(values: Values, *, with_tools: bool) -> bool:
    """Return whether by these fields, as every parser reads them, no engine fetches caches from elsewhere, runs code,
    compiles a grammar or renders another chat template.

    `with_tools`: whether what an engine does with these fields may have it compile the schemas of tools.
    """
    has_tools = with_tools and bool(said_in(values, {"tools"}))
    return _FOREIGN.isdisjoint(values) and not (has_tools or other_guides(values) or brings_template(values))


def brings_template(values: Values) -> bool:
    """Return whether a server may render another chat template than the model's, or in another way, by these fields."""
    return bool(said_in(values, {"chat_template"})) or _renders_otherwise(values)


def _renders_otherwise(values: Values) -> bool:
    """Return whether what is to be variables of the chat template is none, or has arguments of what renders it."""
    variables = values.get("chat_template_kwargs", _NULL)
    try:
        check_variables(_variables_decoder.decode(variables) or ())
    except (*_UNREADABLE, InvalidRequest):
        return True
    return False


def check_tools(values: Values) -> None:
    """Raise CostlyGuide if the schemas of tools that an engine compiles are beyond the bounds of structured output.

    It compiles those of tools that say `strict`, and all if the model must call one. Raises InvalidRequest for tools that are not
    understood.
    """
    try:
        tools = _tools_decoder.decode(values.get("tools", _NULL)) or ()
        choice = _choice_decoder.decode(values.get("tool_choice", _NULL)) or "auto"
    except _UNREADABLE as error:
        raise InvalidRequest(f"the tools are not understood: {error}", param="tools") from None
    must_call = (choice if isinstance(choice, str) else choice.type) not in _FREE_CHOICES
    schemas = [
        tool.input_schema or (tool.function.parameters if tool.function else tool.parameters)
        for tool in tools
        if must_call or tool.strict or (tool.function is not None and tool.function.strict)
    ]
    if schemas:
        check_guided({"json_schema": {"anyOf": schemas}})


def check_plain_guides(values: Values) -> None:
    """Raise CostlyGuide for a schema, pattern or grammar in a field of its own that is beyond the bounds of structured output."""
    for name, kind in PLAIN_GUIDES.items():
        value = _decoded(_any_decoder, values.get(name, _NULL))
        if isinstance(value, str):
            check_guided({kind: value})
        elif isinstance(value, dict):
            check_guided({"json_schema": value})


def other_guides(values: Values, known: Collection[str] = ()) -> set[str]:
    """Return the fields beside those in `known` by which an engine server may take schemas and grammars."""
    return {name for name in said_in(values, _GUIDES.difference(known)) if name not in _TEXTS or bytes(values[name])[:1] != b'"'}


def asks_for_one(values: Values) -> bool:
    """Return whether these fields ask for one choice of one prompt: text, token ids, or one conversation."""
    choices = (bytes(values[name]) for name in ("n", "best_of") if name in values)
    lists = (bytes(values[name])[1:].lstrip() for name in ("prompt", "prompt_embeds") if bytes(values.get(name, b""))[:1] == b"[")
    if bytes(values.get("messages", b""))[1:].lstrip()[:1] == b"[":
        return False
    return all(each in (b"1", b"null") for each in choices) and all(each[:1].isdigit() for each in lists)


def beyond_rights(values: Values, *, adapters: bool, priorities: bool) -> str:
    """Return a field by which an engine fetches caches from elsewhere, runs code, renders a template or processes media
    otherwise, with `adapters` computes an adapter, or with `priorities` takes another request's turn: to some engines a low
    number is urgent, to others a high one.

    An empty string if there is none but null ones and a priority of 0.
    """
    names = _FOREIGN | (_ADAPTERS if adapters else set()) | ({"priority"} if priorities else set())
    said = said_in(values, names)
    if _renders_otherwise(values):
        said.add("chat_template_kwargs")
    said |= {name for name in said_in(values, _PROCESSING) if _decoded(_switches_decoder, values[name]) is None}
    return min(said - ({"priority"} if bytes(values.get("priority", b"")) == b"0" else set()), default="")


def changed_body(body: bytes, *, model: str, cache_salt: str = "") -> bytes | None:
    """Return a JSON object with these fields; None if it has them already, or is none. An empty value changes nothing.

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


def _decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T | None:
    try:
        return decoder.decode(body)
    except _UNREADABLE:
        return None


def _encode(values: dict[str, msgspec.Raw], changes: dict[str, str]) -> bytes:
    return msgspec.json.encode({**values, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changes.items()}})


def _text(value: msgspec.Raw | None) -> str | None:
    """Return a field's value; None for one that is not a string."""
    return None if value is None else _decoded(_texts_decoder, value)
