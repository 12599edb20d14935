"""The comparison of two responses, and the differences that are accepted."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.differential.server_client import Response

ACCEPTED = Path(__file__).with_name("accepted.toml")
_VARIES = frozenset(("ns", "last_inference", "memory_usage"))
"""Times, and the memory that a process happens to use."""
_SERVER = frozenset(("name", "version", "extensions"))
"""The fields of a server's metadata, all of which name the server."""


_FOLDER = re.compile(r"/tmp/[^ ]*?/models\b")
"""Where a run keeps its repository."""


class Part(StrEnum):
    """What differs between two responses."""

    STATUS = "status"
    WORDS = "words"
    """The text of the error."""
    BODY = "body"
    HEADERS = "headers"
    """The HTTP headers that clients act on."""


@dataclass(slots=True)
class Difference:
    """A difference that is accepted, with its justification."""

    title: str
    cases: Sequence[str]
    """Patterns of names of cases, as of `fnmatch`."""
    differs: Sequence[str]
    """The parts that may differ."""
    triton: str
    here: str
    why: str
    match: str = ""
    """A regular expression of Triton's status and words; empty: any."""
    count: int = field(default=0)
    """How many cases it explains in this run."""

    def may_end_triton(self, case: str) -> bool:
        """Return whether this entry says that a case may end a Triton."""
        return self.match.startswith("ended") and any(fnmatchcase(case, pattern) for pattern in self.cases)

    def explains(self, case: str, triton: Response, parts: frozenset[Part]) -> bool:
        """Return whether this entry accepts that a response differs from Triton's in these parts."""
        return (
            parts <= set(self.differs)
            and re.match(self.match, f"{triton.status} {triton.words}") is not None
            and any(fnmatchcase(case, pattern) for pattern in self.cases)
        )


def accepted_differences(path: Path = ACCEPTED) -> list[Difference]:
    """Read the list. Raises TypeError for an entry with a missing or unknown field."""
    return [Difference(**entry) for entry in tomllib.loads(path.read_text())["difference"]]


def compare(triton: Response, here: Response) -> frozenset[Part]:
    """Return the parts in which two responses differ."""
    differs = {
        Part.STATUS: triton.status != here.status,
        Part.WORDS: _FOLDER.sub("", triton.words) != _FOLDER.sub("", here.words),
        Part.BODY: normalise(triton.body) != normalise(here.body),
        Part.HEADERS: dict(triton.headers) != dict(here.headers),
    }
    return frozenset(part for part, does in differs.items() if does)


def normalise(value: Any) -> Any:
    """Return a body without what differs between any two servers or runs."""
    if isinstance(value, Mapping):
        if value.keys() == _SERVER:
            return sorted(value)
        return {key: normalise(item) for key, item in value.items() if key not in _VARIES}
    if isinstance(value, list):
        return [normalise(item) for item in value]
    return value


def first_difference(triton: Any, here: Any, path: str = "") -> str:
    """Return the first place where two bodies differ, in one line; empty if they do not."""
    if isinstance(triton, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys((*triton, *here)):
            if key not in here:
                return f"{path}.{key} is missing; Triton has {_short(triton[key])}"
            if key not in triton:
                return f"{path}.{key} is {_short(here[key])}; Triton has none"
            if text := first_difference(triton[key], here[key], f"{path}.{key}"):
                return text
        return ""
    if isinstance(triton, list) and isinstance(here, list):
        for index, (one, other) in enumerate(zip(triton, here, strict=False)):
            if text := first_difference(one, other, f"{path}[{index}]"):
                return text
        return "" if len(triton) == len(here) else f"{path} has {len(here)} entries; Triton's has {len(triton)}"
    return "" if triton == here else f"{path} is {_short(here)}; Triton has {_short(triton)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:159] + "…"


def explanation(case: str, triton: Response, parts: frozenset[Part], accepted: Iterable[Difference]) -> Difference | None:
    """Return the first entry of the list that explains the difference, with its count raised; None if there is none."""
    for difference in accepted:
        if difference.explains(case, triton, parts):
            difference.count += 1
            return difference
    return None
