"""Lines of the output and error files of batches."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from dynamo.frontend.api.openai.batches.batch import BatchLine

_NOT_REACHED = "the batch ended before this request was carried out"
_MARK = b"\0"
"""Stands in no JSON."""


def line_id(batch: str, line: BatchLine) -> str:
    return f"batch_req_{hashlib.sha256(f'{batch} {line.custom_id}'.encode()).hexdigest()[:32]}"


def result_line(
    batch: str, line: BatchLine, response: tuple[int, bytes] | None, code: str = "", why: str = _NOT_REACHED
) -> bytes:
    """Return a line of the output or error file; without a response, one of an error."""
    id = line_id(batch, line)
    result: dict[str, Any] = {"id": id, "custom_id": line.custom_id, "response": None, "error": None}
    if response is None:
        result["error"] = {"code": code, "message": why}
    else:
        status, body = response
        result["response"] = {"status_code": status, "request_id": id, "body": Raw(_MARK)}
        before, _, after = msgspec.json.encode(result).partition(_MARK)
        return b"".join((before, body, after, b"\n"))  # the one copy of what may be long
    return msgspec.json.encode(result) + b"\n"
