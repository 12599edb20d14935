"""`dynamo-keys`: makes API keys and the file of their hashes for `dynamo-frontend --api-keys-file`; shows what they have used."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from dynamo.common.admin_api import AdminApi, AdminParser, add_options
from dynamo.common.config import ConfigError, exit_with, parse_bytes
from dynamo.frontend.security.keys import (
    MAX_LIMIT,
    MAX_PRIORITY,
    MAX_WEIGHT,
    MIN_WEIGHT,
    KeyRing,
    Limits,
    entry_for,
    make_key,
    parse_expiry,
    parse_keys,
    read_keys,
)
from dynamo.frontend.security.ledger import Row
from dynamo.frontend.security.surfaces import Scope

PROGRAM = "dynamo-keys"
_COLUMNS = ("day", "key", "model", "requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens", "media")


class _Report(msgspec.Struct):
    usage: list[Row]


def main(argv: Sequence[str] | None = None) -> None:
    try:
        arguments = _parser().parse_args(argv)
        match arguments.command:
            case "add":
                _add(arguments)
            case "usage":
                _usage(arguments)
            case _:
                if (file := arguments.named_file or arguments.file) is None:
                    raise ConfigError("list needs the key file: dynamo-keys list FILE")
                _list(file)
    except (ConfigError, ValueError) as error:
        exit_with(PROGRAM, error)
    except OSError as error:
        exit_with(PROGRAM, ConfigError(f"{error.filename}: {error.strerror}"))


def _parser() -> argparse.ArgumentParser:
    parser = AdminParser(PROGRAM, description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "add", help="Make a key, write its hash into a file, and print the key, which cannot be shown again."
    )
    add.add_argument("name", help="Names the key's owner in logs.")
    add.add_argument(
        "--api-keys-file", "--file", dest="file", type=Path, required=True, help="The key file; created if it does not exist."
    )
    add.add_argument("--scope", action="append", choices=[scope.value for scope in Scope], help="Repeatable; default: infer.")
    add.add_argument("--model", action="append", metavar="PATTERN", help="Models that the key may use; repeatable; default: all.")
    add.add_argument("--requests-per-s", type=float, metavar="N")
    add.add_argument("--concurrent-requests", type=int, metavar="N")
    add.add_argument("--tokens-per-minute", type=int, metavar="N", help="Read and generated, together.")
    add.add_argument(
        "--stored-bytes", metavar="SIZE", help="Of files, batches, responses and conversations together; such as 10GiB."
    )
    add.add_argument(
        "--weight",
        type=float,
        default=1.0,
        metavar="N",
        help="In proportion to other keys, where requests queue; default: 1.",
    )
    add.add_argument(
        "--max-priority",
        type=int,
        default=0,
        metavar="N",
        help="The highest priority that its requests may have; default: 0, so that it may lower the priority of some only.",
    )
    add.add_argument(
        "--cache-group",
        default="",
        metavar="NAME",
        help="Share cached prompts with other keys of this group; default: with none.",
    )
    add.add_argument("--expires", metavar="DATE", help="2027-01-31, or with a time.")
    add.add_argument("--stdin", action="store_true", help="Take a key made elsewhere from the standard input.")
    listed = commands.add_parser("list", help="Check a key file and print what its keys may use.")
    listed.add_argument("file", type=Path, nargs="?", metavar="FILE", help="The key file; the same as --api-keys-file.")
    listed.add_argument("--api-keys-file", "--file", dest="named_file", type=Path, metavar="FILE", help="The key file.")
    usage = commands.add_parser("usage", help="Print what keys have used, by day, key and model, as CSV.")
    add_options(usage)
    usage.add_argument("--from", metavar="DATE", help="The first day, in UTC; default: 30 days before the last.")
    usage.add_argument("--to", metavar="DATE", help="The last day; default: today.")
    usage.add_argument("--key", metavar="NAME", help="Of this key only.")
    usage.add_argument("--model", metavar="NAME", help="Of this model only.")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that would make a useless key, by the name of the option."""
    for flag in ("--requests-per-s", "--concurrent-requests", "--tokens-per-minute"):
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None and not 0 < value <= MAX_LIMIT:
            raise ConfigError(f"{flag} must be above 0 and at most {MAX_LIMIT}, got {value:g}")
    if not MIN_WEIGHT <= arguments.weight <= MAX_WEIGHT:
        raise ConfigError(f"--weight must be at least {MIN_WEIGHT} and at most {MAX_WEIGHT}, got {arguments.weight:g}")
    if abs(arguments.max_priority) > MAX_PRIORITY:
        raise ConfigError(f"--max-priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {arguments.max_priority}")
    if arguments.expires is None:
        return
    try:
        expires_at = parse_expiry(arguments.expires)
    except ValueError:
        raise ConfigError(f"--expires must be a date or a date and time, got {arguments.expires!r}") from None
    if expires_at <= time.time():
        raise ConfigError(f"--expires must be in the future, got {arguments.expires}, which is {_day(expires_at)}")


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--stored-bytes {error}, got {text!r}") from None
    if size < 1:
        raise ConfigError(f"--stored-bytes must be above 0, got {text}")
    return size


def _add(arguments: argparse.Namespace) -> None:
    _check(arguments)
    file: Path = arguments.file
    key = sys.stdin.readline().strip() if arguments.stdin else make_key()
    entry = entry_for(
        key,
        arguments.name,
        scopes=[Scope(scope) for scope in arguments.scope or [Scope.INFER]],
        models=arguments.model or ["*"],
        limits=Limits(
            requests_per_s=arguments.requests_per_s,
            concurrent_requests=arguments.concurrent_requests,
            tokens_per_minute=arguments.tokens_per_minute,
            stored_bytes=_size(arguments.stored_bytes),
        ),
        weight=arguments.weight,
        max_priority=arguments.max_priority,
        cache_group=arguments.cache_group,
        expires=arguments.expires,
    )
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    if before.strip() == "[]":
        before = ""
    if before and not before.endswith("\n"):
        before += "\n"
    try:
        parse_keys(before + entry)
    except ValueError as error:
        raise ConfigError(f"{file}, with the new key: {error}") from None
    _replace(file, before + entry)
    print(f"{PROGRAM}: {file} now contains the key '{arguments.name}'", file=sys.stderr)
    if not arguments.stdin:
        print(key)


def _replace(file: Path, text: str) -> None:
    """Replace the file atomically, so that a server which reads it meanwhile gets the old or the new keys."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream:
            stream.write(text)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _list(file: Path) -> None:
    ring: KeyRing = read_keys(file)
    for key in ring.keys:
        limits = key.limits
        notes = [f"scopes {','.join(sorted(key.scopes))}", f"models {','.join(key.models)}"]
        if limits.requests_per_s is not None:
            notes.append(f"{limits.requests_per_s:g} requests/s")
        if limits.concurrent_requests is not None:
            notes.append(f"{limits.concurrent_requests} at once")
        if limits.tokens_per_minute is not None:
            notes.append(f"{limits.tokens_per_minute} tokens/min")
        if limits.stored_bytes is not None:
            notes.append(f"{limits.stored_bytes} bytes stored")
        if key.weight != 1:
            notes.append(f"weight {key.weight:g}")
        if key.max_priority:
            notes.append(f"priority up to {key.max_priority}")
        if key.cache_group:
            notes.append(f"cached prompts of group {key.cache_group}")
        if key.expires_at is not None:
            notes.append(("expired " if time.time() >= key.expires_at else "until ") + _day(key.expires_at))
        print(f"{key.name}: {'; '.join(notes)}")


def _usage(arguments: argparse.Namespace) -> None:
    """Write CSV with a heading to the standard output."""
    query = {name: value for name in ("from", "to", "key", "model") if (value := getattr(arguments, name)) is not None}
    response = AdminApi.of(arguments).send("GET", f"/v1/usage?{urlencode(query)}")
    writer = csv.DictWriter(sys.stdout, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(msgspec.structs.asdict, msgspec.json.decode(response, type=_Report).usage))


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%MZ", time.gmtime(moment))


if __name__ == "__main__":
    main()
