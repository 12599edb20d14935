"""Fields of a request's body that are changed on the way to its endpoint: the model's name there, and a salt for its cache."""

from __future__ import annotations

import msgspec


class _Fields(msgspec.Struct):
    model: str | None = None
    cache_salt: str | None = None


_fields_decoder = msgspec.json.Decoder(_Fields)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


def model_in(body: bytes) -> str:
    """Return the model that a body names; an empty string if it names none, or is not JSON."""
    try:
        return _fields_decoder.decode(body).model or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def changed_body(body: bytes, *, model: str, cache_salt: str = "") -> bytes | None:
    """Return a JSON object with these fields; None if it has them already, or cannot be read. An empty value changes nothing."""
    try:
        fields = _fields_decoder.decode(body)
        changes = {
            name: value
            for name, value, is_there in (("model", model, fields.model), ("cache_salt", cache_salt, fields.cache_salt))
            if value and value != is_there
        }
        if not changes:
            return None
        values = _objects.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return msgspec.json.encode({**values, **{name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changes.items()}})
