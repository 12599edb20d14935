"""Which model a path below /v2 names.

A model's name may contain `/`, as it is or as `%2F`: everything up to `/versions/…` or the last word belongs to it. Only a name
that ends like one of the paths in `operations.py` has to be encoded. Versions are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.frontend.api.http.errors import PathNotFound


@dataclass(frozen=True, slots=True)
class ModelPath:
    """The model, its version and the repository that a path names; empty where it names none."""

    model: str = ""
    version: str = ""
    repository: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> ModelPath:
        """Raises PathNotFound for a version that is no number."""
        version = parameters.get("version", "")
        if version and not (version.isascii() and version.isdecimal()):
            raise PathNotFound(f"…/versions/{version}")
        return cls(parameters.get("model", ""), version, parameters.get("repository", ""))
