"""From a name to the models that one request tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from dynamo.frontend.names.rules import MAX_DEPTH, Condition, Rule, Sticky, Target

MAX_CANDIDATES = 8
"""Models that one request tries at most."""

Draw = Callable[[], float]
"""Returns a random number from 0 to below 1."""
Permits = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that may serve a request."""

    model: str
    on: frozenset[Condition] = frozenset()
    """The failures of the models before it after which it is tried; of the first one: none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request does about its name."""

    candidates: tuple[Candidate, ...]
    """In the order in which they are tried; empty if the caller may use none of them."""
    shadows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """By what a request may stick to a target; empty: it says nothing of the kind."""

    session: str = ""
    user: str = ""
    sequence: str = ""
    """A sequence of KServe: all its requests need the same model, whatever the rule says."""

    def key(self, sticky: Sticky | None) -> str:
        if self.sequence:
            return self.sequence
        match sticky:
            case Sticky.SESSION:
                return self.session
            case Sticky.USER:
                return self.user
            case None:
                return ""


def make_plan(rules: Mapping[str, Rule], name: str, identity: Identity, permits: Permits, draw: Draw) -> Plan:
    """Return the plan for a request by `name`, which has a rule. `permits` says which models the caller may use.

    Targets and fallbacks that the caller may not use are left out. Shadows are the operator's own and need no permission.
    """
    shadows: list[str] = []
    candidates: dict[str, Candidate] = {}
    for candidate in _candidates(rules, name, identity, permits, draw, shadows, (), frozenset()):
        candidates.setdefault(candidate.model, candidate)
    tried = tuple(candidates.values())[: 1 if identity.sequence else MAX_CANDIDATES]
    return Plan(tried, tuple(dict.fromkeys(shadows)))


def representative(rules: Mapping[str, Rule], name: str, permits: Permits, is_ready: Callable[[str], bool]) -> str | None:
    """Return the model that stands for `name` where one has to be described; None if the caller may use none.

    That is the first ready one of those that requests may reach, targets by weight before fallbacks; the first if none is ready.
    """
    models = list(dict.fromkeys(_reachable(rules, name, permits, set())))
    return next(filter(is_ready, models), models[0] if models else None)


def _candidates(
    rules: Mapping[str, Rule],
    name: str,
    identity: Identity,
    permits: Permits,
    draw: Draw,
    shadows: list[str],
    path: tuple[str, ...],
    on: frozenset[Condition],
) -> list[Candidate]:
    """Return what `name` stands for on the `path` of rules that led to it; the first is tried after the failures in `on`."""
    rule = None if path[-1:] == (name,) else rules.get(name)
    if rule is None or len(path) > MAX_DEPTH:
        return [Candidate(name, on)]
    usable = [target for target in rule.targets if target.weight and permits(target.model)]
    path = (*path, name)
    candidates: list[Candidate] = []
    if usable:
        target = pick(usable, name, identity.key(rule.sticky), draw)
        candidates += _candidates(rules, target.model, identity, permits, draw, shadows, path, on)
    if not on:  # fallbacks send no copies: the models before them have
        shadows += [
            shadowed for shadow in rule.shadows if draw() < shadow.share for shadowed in _first(rules, shadow.model, draw, path)
        ]
    for fallback in rule.fallbacks:
        if permits(fallback.model) and len(candidates) < MAX_CANDIDATES:
            conditions = frozenset(fallback.on) if candidates else on
            candidates += _candidates(rules, fallback.model, identity, permits, draw, [], path, conditions)
    return candidates


def _first(rules: Mapping[str, Rule], name: str, draw: Draw, path: tuple[str, ...]) -> list[str]:
    """Return the model to which a copy for `name` goes."""
    candidates = _candidates(rules, name, Identity(), lambda model: True, draw, [], path, frozenset())
    return [candidate.model for candidate in candidates[:1]]


def _reachable(rules: Mapping[str, Rule], name: str, permits: Permits, seen: set[str]) -> Iterator[str]:
    """Yield the models that requests by `name` may reach, but not by the rules in `seen`, to which this adds."""
    rule = rules.get(name)
    if rule is None:
        yield name
        return
    if name in seen:
        return
    seen.add(name)
    weighty = sorted((target for target in rule.targets if target.weight), key=lambda target: -target.weight)
    for model in (*(target.model for target in weighty), *(fallback.model for fallback in rule.fallbacks)):
        if model == name:
            yield name
        elif permits(model):
            yield from _reachable(rules, model, permits, seen)


def pick(targets: Sequence[Target], name: str, key: str, draw: Draw) -> Target:
    """Return one of the targets, whose weights are above 0: by weight at random or, with a `key`, always the same for this key.

    By key this is weighted rendezvous hashing: when a weight changes, only keys move that have to.
    """
    if len(targets) == 1:
        return targets[0]
    if key:
        return max(targets, key=lambda target: _score(target, name, key))
    left = draw() * sum(target.weight for target in targets)
    for target in targets:
        left -= target.weight
        if left < 0:
            return target
    return targets[-1]


def _score(target: Target, name: str, key: str) -> float:
    """Return a score by which, over all keys, each target is the highest in proportion to its weight."""
    hashed = xxhash.xxh3_64_intdigest(f"{name}\0{target.model}\0{key}".encode()) >> 12
    return target.weight / -math.log((hashed + 0.5) / 2**52)
