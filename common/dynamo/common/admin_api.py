"""The admin API of a frontend, as programs of operators use it: their options, and requests with an API key."""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from dynamo.common.config import ConfigError

_TIMEOUT_S = 30.0
_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "DYN_API_KEY"


class AdminParser(argparse.ArgumentParser):
    """The command line of a program of operators: a mistake in it is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_options(parser: argparse.ArgumentParser, commands: Sequence[argparse.ArgumentParser] = ()) -> None:
    """Add the options to a command line, and to its `commands`, so that they may stand before and after the command."""
    _add_options(parser, url=_URL, file=None)
    for command in commands:
        _add_options(command, url=argparse.SUPPRESS, file=argparse.SUPPRESS)


def _add_options(parser: argparse.ArgumentParser, *, url: str, file: str | None) -> None:
    parser.add_argument("--url", default=url, help=f"A frontend's HTTP port; default: {_URL}.")
    add_key_option(parser, default=file)


def add_key_option(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--api-key-file", default=default, metavar="FILE", help=f"A file with an API key; default: the variable {_KEY_VARIABLE}."
    )


@dataclass(frozen=True, slots=True)
class AdminApi:
    url: str
    key: str

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> AdminApi:
        """Return the one that the options name. Raises ConfigError."""
        url: str = arguments.url
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {url!r}")
        return cls(url.rstrip("/"), read_key(arguments.api_key_file))

    def send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Return the body of the response. Raises ConfigError with the server's sentence if it refuses."""
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.url} responded {error.code}: {_sentence(error.read())}") from None
        except (OSError, urllib.error.URLError) as error:
            raise ConfigError(f"{self.url} cannot be reached: {getattr(error, 'reason', error)}") from None


def _sentence(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def read_key(file: str | None) -> str:
    """Return the key in `file` or, without one, in the variable; empty if there is none. Raises ConfigError."""
    if file is None:
        return os.environ.get(_KEY_VARIABLE, "")
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.readline().strip()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
