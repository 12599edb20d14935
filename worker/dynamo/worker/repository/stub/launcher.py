"""Starts `process` with the Python of another environment: `python launcher.py PACKAGES SOCKET PROGRESS`.

PACKAGES is JSON: where the packages are that `process` needs. `dynamo` is the worker's own; the others are taken from
there only if the environment has none. Nothing else of the worker's can be imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Fallback:
    """Finds packages that are nowhere else."""

    def __init__(self, places: Mapping[str, list[str]]) -> None:
        self._places = places

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        places = self._places.get(name)
        return None if places is None else PathFinder.find_spec(name, places, target)


def main() -> None:
    places: dict[str, list[str]] = json.loads(sys.argv.pop(1))
    package = ModuleType("dynamo")
    package.__path__ = places.pop("dynamo")
    sys.modules["dynamo"] = package
    sys.meta_path.append(_Fallback(places))
    from dynamo.worker.repository.stub import process

    process.main()


if __name__ == "__main__":
    main()
