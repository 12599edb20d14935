"""Logins of etcd and nats-server, made at each start, so that other users of the machine cannot use the servers.

Passwords are random and stand in files that only the own user can read: never in arguments, which every user can list.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.common.errors import DynamoError

_CALL_TIMEOUT_S = 5.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LoginsNotSet(DynamoError):
    """etcd did not take the login, or another user of the machine was faster."""


@dataclass(frozen=True, slots=True)
class Login:
    user: str
    file: Path
    """Holds the password; mode 0600."""
    password: str = field(repr=False)


def make_login(user: str, file: Path) -> Login:
    """Write a new random password to `file` and return the login. Raises OSError."""
    password = secrets.token_urlsafe(32)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as stream:
        stream.write(password)
    return Login(user, file, password)


async def protect_etcd(url: str, login: Login) -> None:
    """Make an etcd that has just been created accept `login` only, as its root.

    Until then every user of the machine can write to it, so it must hold nothing else afterwards: no key and no other user.
    Raises LoginsNotSet.
    """
    try:
        await asyncio.to_thread(_protect_etcd, url, login)
    except (OSError, ValueError, KeyError) as error:
        raise LoginsNotSet(f"etcd at {url} cannot be given a login: {_reason(error)}") from error


def _protect_etcd(url: str, login: Login) -> None:
    _call(url, "auth/user/add", {"name": login.user, "password": login.password})
    _call(url, "auth/user/grant", {"user": login.user, "role": "root"})
    _call(url, "auth/enable", {})
    token = _call(url, "auth/authenticate", {"name": login.user, "password": login.password})["token"]
    users = _call(url, "auth/user/list", {}, token)["users"]
    keys = _call(url, "kv/range", {"key": "AA==", "range_end": "AA==", "count_only": True}, token).get("count", "0")
    if users != [login.user] or int(keys):
        raise LoginsNotSet(f"etcd at {url} was used by another program while it started")


def _call(url: str, path: str, body: Mapping[str, object], token: str = "") -> dict[str, Any]:
    """Call etcd's JSON gateway. Raises OSError, ValueError."""
    headers = {"content-type": "application/json", **({"authorization": token} if token else {})}
    request = urllib.request.Request(f"{url}/v3/{path}", json.dumps(body).encode(), headers)  # noqa: S310  # our own server
    with _DIRECT.open(request, timeout=_CALL_TIMEOUT_S) as response:
        result = json.load(response)
    return result if isinstance(result, dict) else {}


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return error.read(300).decode(errors="replace")
    return str(error)
