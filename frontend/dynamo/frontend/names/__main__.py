"""`dynamo-models`: shows and changes the names that requests may use for models, through the admin API of a frontend.

dynamo-models list
dynamo-models set chat llama=95 llama-new=5 --sticky session --fallback small:no_instances,overloaded --shadow next=0.1
dynamo-models remove chat
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from dynamo.common.admin_api import AdminApi, AdminParser, add_options
from dynamo.common.config import ConfigError, exit_with
from dynamo.common.errors import InvalidRequest
from dynamo.frontend.names.rules import Condition, Fallback, Rule, Shadow, Sticky, Target, check_rules

PROGRAM = "dynamo-models"


class _Named(Rule, frozen=True, kw_only=True):
    name: str


class _NameList(msgspec.Struct):
    names: list[_Named]


class _Listed(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Listed]


def main(argv: Sequence[str] | None = None) -> None:
    try:
        arguments = _parser().parse_args(argv)
        match arguments.command:
            case "set":
                _set(arguments)
            case "remove":
                AdminApi.of(arguments).send("DELETE", _path(arguments.name))
                print(f"{PROGRAM}: '{arguments.name}' is removed", file=sys.stderr)
            case _:
                _list(arguments)
    except (ConfigError, ValueError) as error:
        exit_with(PROGRAM, error)
    except InvalidRequest as error:
        exit_with(PROGRAM, ConfigError(str(error)))


def _parser() -> argparse.ArgumentParser:
    parser = AdminParser(PROGRAM, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("list", help="Print the names and what they stand for, in the form that `set` takes.")
    add = commands.add_parser("set", help="Set what a name stands for; what it stood for before is replaced.")
    add.add_argument("name")
    add.add_argument("target", nargs="+", metavar="MODEL[=WEIGHT]", help="Requests are split by weight; default: 1 each.")
    conditions = ",".join(Condition)
    add.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="MODEL[:CONDITION,…]",
        help=f"The model that serves instead, under any of the conditions; repeatable; default: {conditions}.",
    )
    add.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="MODEL[=SHARE]",
        help="Gets copies of this share (1: all); repeatable.",
    )
    add.add_argument("--sticky", choices=[sticky.value for sticky in Sticky], help="Whose requests go to the same target.")
    remove = commands.add_parser("remove", help="Remove a name.")
    remove.add_argument("name")
    add_options(parser, [listed, add, remove])
    return parser


def _set(arguments: argparse.Namespace) -> None:
    rule = Rule(
        targets=tuple(Target(model=model, weight=weight) for model, weight in map(_share, arguments.target)),
        fallbacks=tuple(map(_fallback, arguments.fallback)),
        shadows=tuple(Shadow(model=model, share=share) for model, share in map(_share, arguments.shadow)),
        sticky=None if arguments.sticky is None else Sticky(arguments.sticky),
    )
    check_rules({arguments.name: rule})
    api = AdminApi.of(arguments)
    api.send("PUT", _path(arguments.name), msgspec.json.encode(rule))
    print(_line(arguments.name, rule))
    for model in _unknown(api, rule):
        print(f"{PROGRAM}: '{model}' is neither a model that is served nor a name", file=sys.stderr)


def _unknown(api: AdminApi, rule: Rule) -> list[str]:
    """Return what the rule names that does not exist now; nothing if the key may not see the models."""
    try:
        body = api.send("GET", "/v1/models")
    except ConfigError:
        return []
    there = {model.id for model in msgspec.json.decode(body, type=_ModelList).data}
    named = [target.model for target in rule.targets]
    named += [fallback.model for fallback in rule.fallbacks]
    named += [shadow.model for shadow in rule.shadows]
    return [model for model in dict.fromkeys(named) if model not in there]


def _list(arguments: argparse.Namespace) -> None:
    for named in msgspec.json.decode(AdminApi.of(arguments).send("GET", "/v1/names"), type=_NameList).names:
        print(_line(named.name, named))


def _share(text: str) -> tuple[str, float]:
    model, equals, number = text.partition("=")
    try:
        return model, float(number) if equals else 1.0
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form MODEL=NUMBER") from None


def _fallback(text: str) -> Fallback:
    model, colon, conditions = text.partition(":")
    if not colon:
        return Fallback(model=model)
    try:
        return Fallback(model=model, on=tuple(map(Condition, conditions.split(","))))
    except ValueError:
        raise ConfigError(f"{text!r} names a condition that does not exist; there are {', '.join(Condition)}") from None


def _line(name: str, rule: Rule) -> str:
    """Return the arguments of `set` that make this rule."""
    words = [name, *(f"{target.model}={target.weight:g}" for target in rule.targets)]
    words += [f"--fallback {fallback.model}:{','.join(fallback.on)}" for fallback in rule.fallbacks]
    words += [f"--shadow {shadow.model}={shadow.share:g}" for shadow in rule.shadows]
    return " ".join([*words, *([] if rule.sticky is None else [f"--sticky {rule.sticky.value}"])])


def _path(name: str) -> str:
    return f"/v1/names/{quote(name, safe='')}"


if __name__ == "__main__":
    main()
