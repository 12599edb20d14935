"""What a name stands for, and when a table of names is valid.

A name may be that of a model as well: where a rule names itself as a target, it means that model. Every other use of a name that
has a rule means the rule, so that names can be built on names, up to a depth of `MAX_DEPTH` and without loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import MAX_NAME_CHARS, check_name

MAX_RULES = 256
MAX_DEPTH = 4
"""Rules that lead from a name to a model."""
MAX_TABLE_BYTES = 256 * 1024
"""Bytes of the table as JSON, at most; etcd takes no values above 1.5 MiB."""

_Model = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, description="A model, or another name.")]


class Condition(StrEnum):
    """Why a model cannot serve a request that another one might."""

    NO_INSTANCES = "no_instances"
    OVERLOADED = "overloaded"
    PROMPT_TOO_LONG = "prompt_too_long"


class Sticky(StrEnum):
    """Which requests always go to the same target, as long as the weights do not change."""

    SESSION = "session"
    USER = "user"


class Target(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the models among which the requests are split."""

    model: _Model
    weight: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0


class Fallback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that serves a request instead, under one of the conditions."""

    model: _Model
    on: Annotated[tuple[Condition, ...], Meta(min_length=1, max_length=len(Condition))] = tuple(Condition)


class Shadow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that gets a copy of this share of the requests; its responses are dropped."""

    model: _Model
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one name stands for."""

    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=16)]
    fallbacks: Annotated[tuple[Fallback, ...], Meta(max_length=4)] = ()
    """In the order in which they are tried."""
    shadows: Annotated[tuple[Shadow, ...], Meta(max_length=4)] = ()
    sticky: Sticky | None = None


class Rules(Struct, frozen=True):
    """The names of a namespace, as they stand in etcd."""

    rules: dict[str, Rule] = msgspec.field(default_factory=dict)


def check_rules(rules: Mapping[str, Rule]) -> None:
    """Raise InvalidRequest, in a sentence that names the rule, unless `rules` can be the names of a namespace."""
    if len(rules) > MAX_RULES:
        raise InvalidRequest(f"the table would have {len(rules)} names; at most {MAX_RULES} are allowed")
    for name, rule in rules.items():
        check_name(name, "name")
        _check_rule(name, rule)
    size = len(msgspec.json.encode(Rules(dict(rules))))
    if size > MAX_TABLE_BYTES:
        raise InvalidRequest(f"the table would have {size} bytes; at most {MAX_TABLE_BYTES} are allowed")
    depths: dict[str, int] = {}
    for name in rules:
        _depth(name, rules, depths, ())


def _check_rule(name: str, rule: Rule) -> None:
    targets = [target.model for target in rule.targets]
    others = [*(fallback.model for fallback in rule.fallbacks), *(shadow.model for shadow in rule.shadows)]
    for model in (*targets, *others):
        check_name(model, f"model name in the rule for '{name}'")
    if len(set(targets)) != len(targets):
        raise InvalidRequest(f"the rule for '{name}' has the same target twice", param="targets")
    if not any(target.weight for target in rule.targets):
        raise InvalidRequest(f"the targets in the rule for '{name}' have no weight above 0", param="targets")
    if name in others:
        raise InvalidRequest(f"the rule for '{name}' has itself as a fallback or shadow; only targets may be the name itself")


def models_of(rule: Rule) -> Iterator[str]:
    """Yield the models, or names, in a rule."""
    yield from (target.model for target in rule.targets)
    yield from (fallback.model for fallback in rule.fallbacks)
    yield from (shadow.model for shadow in rule.shadows)


def _depth(name: str, rules: Mapping[str, Rule], depths: dict[str, int], path: tuple[str, ...]) -> int:
    """Return how many rules lead from `name` to a model at most. Raises InvalidRequest for loops and long chains."""
    if name not in rules:
        return 0
    if name in path:
        raise InvalidRequest(f"the names form a loop: {' → '.join((*path[path.index(name) :], name))}")
    path = (*path, name)
    if len(path) > MAX_DEPTH:
        raise InvalidRequest(f"the names form a chain of more than {MAX_DEPTH}: {' → '.join(path)}")
    if name not in depths:
        depths[name] = 1 + max((_depth(each, rules, depths, path) for each in models_of(rules[name]) if each != name), default=0)
    depth = depths[name]
    if len(path) + depth - 1 > MAX_DEPTH:
        raise InvalidRequest(f"the names form a chain of more than {MAX_DEPTH} that begins with '{path[0]}'")
    return depth
