"""Errors in the words of Triton, which its clients and their tests look for."""

from __future__ import annotations

import re

import msgspec

from dynamo.common.errors import InvalidRequest, ModelNotFound, VersionUnloaded
from dynamo.frontend.api.http.errors import ErrorForm
from dynamo.frontend.api.statuses import public_message

_VERSION = re.compile("0|[1-9][0-9]{0,18}")
_MAX_VERSION = 2**63 - 1


def kserve_message(error: BaseException) -> str:
    """Return what the caller of a KServe operation may read of an error."""
    if isinstance(error, VersionUnloaded):
        return f"Request for unknown model: '{error.model}' version {error.version} is not at ready state"
    if not isinstance(error, ModelNotFound):
        return public_message(error)
    if error.version:
        return f"Request for unknown model: '{error.model}' version {error.version} is not found"
    what = "has no available versions" if error.is_unloaded else "is not found"
    return f"Request for unknown model: '{error.model}' {what}"


def check_version(version: str) -> str:
    """Return `version` if it is empty or a version number. Raises InvalidRequest otherwise."""
    if not version or (_VERSION.fullmatch(version) and int(version) <= _MAX_VERSION):
        return version
    if _VERSION.fullmatch(version.removeprefix("-")):
        raise InvalidRequest(f"invalid model version specified '{version[:40]}' , version should be an integral value > 0")
    raise InvalidRequest(
        f"failed to get model version from specified version string '{version[:40]}' (details: stol), version should be an "
        "integral value > 0"
    )


def _body(error: BaseException, status: int) -> bytes:
    return msgspec.json.encode({"error": kserve_message(error)})


KSERVE_ERRORS = ErrorForm(body=_body, event=lambda error, status: b"data: " + _body(error, status) + b"\n\n")
"""`{"error": "…"}`."""
