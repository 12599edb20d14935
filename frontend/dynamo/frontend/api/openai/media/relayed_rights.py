"""What callers may say in bodies that are relayed: a server knows no API keys, and does for any caller what the body says."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.guided_rules import CostlyGuide, check_guided
from dynamo.common.repository import ALL_MODELS
from dynamo.frontend.api.http.body_fields import (
    Values,
    beyond_rights,
    brings_template,
    check_plain_guides,
    check_tools,
    other_guides,
    said_in,
)
from dynamo.frontend.api.openai.requests import Json, ResponseFormat, StructuredOutputs, TextGenerationRequest
from dynamo.frontend.api.openai.to_text import guided_of
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.keys import MAX_PRIORITY

_MAX_DIGITS: Final = 9
_TEXTS: Final = ("guided_json", "guided_regex", "guided_grammar")
"""Guides that may be texts; a `response_format` that is one is that of audio or pictures."""


class _RelayedGuides(msgspec.Struct):
    """The fields of a chat by which its output is bound to a structure, as the server reads them."""

    response_format: ResponseFormat | str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


_guides_decoder = msgspec.json.Decoder(_RelayedGuides)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def check_rights(values: Values, account: Account) -> None:
    """Raise InvalidRequest for a field that is not for the caller to say, where there are API keys."""
    if account is ANONYMOUS:
        return
    adapters, priorities = account.models != ALL_MODELS, account.max_priority < MAX_PRIORITY
    if name := beyond_rights(values, adapters=adapters, priorities=priorities):
        raise InvalidRequest(f"'{name}' is not for {_caller(account)} to say", param=name)


def check_template(values: Values) -> None:
    """Raise InvalidRequest for a chat that has another template than the model's rendered, as an argument or a variable."""
    if brings_template(values):
        message = "requests may not bring a chat template, nor say how it is rendered by 'chat_template_kwargs'"
        raise InvalidRequest(f"{message}: the server runs without --trust-request-chat-template", param="chat_template")


def check_guides(body: bytes, values: Values, account: Account) -> None:
    """Raise InvalidRequest for structured output that no engine should compile.

    Where there are API keys, it raises that for what is not understood, too. `values`: the fields of the JSON object `body`.
    """
    has_keys = account is not ANONYMOUS
    if has_keys and (unknown := other_guides(values, _RelayedGuides.__struct_fields__)):
        name = min(unknown)
        raise InvalidRequest(f"'{name}' is not for {_caller(account)} to say: what it costs is not known", param=name)
    try:
        said = _guides_decoder.decode(body)
    except _UNREADABLE as error:
        if has_keys:
            raise InvalidRequest(f"the structured output is not understood: {error}") from None
        return
    fields = {name: value for name, value in msgspec.structs.asdict(said).items() if not isinstance(value, str) or name in _TEXTS}
    check_guided(guided_of(TextGenerationRequest(**fields)))
    check_plain_guides(values)
    try:
        check_tools(values)
    except CostlyGuide:
        raise
    except InvalidRequest:
        if has_keys:
            raise


def sequences_in(values: Values, most: int) -> int:
    """Return how many results a body asks for. Raises InvalidRequest for more than `most`, and for a number that is none."""
    said = [bytes(values[name]) for name in said_in(values, {"n", "best_of"})]
    counts = [int(each) for each in said if each.isdigit() and len(each) <= _MAX_DIGITS]
    if len(counts) < len(said) or max(counts, default=1) > most:
        raise InvalidRequest(f"'n' must be a whole number of at most {most}", param="n")
    return max(1, *counts, 1)


def _caller(account: Account) -> str:
    return f"the API key '{account.name}'" if account.name else "a caller without an API key"
