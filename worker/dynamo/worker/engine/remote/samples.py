"""The samples on a page of metrics of an engine server."""

from __future__ import annotations

import re
from collections.abc import Container
from io import StringIO
from typing import NamedTuple

_SAMPLE = re.compile(r"^([a-z]+:\w+)(?:\{(.*)\})? ([0-9]{1,18}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)(?: \d+)?\r?\n?$")
_MAX_LINE_CHARS = 4096
_MAX_CHARS = 512 * 1024
"""A name of 64 engines takes some 10 KiB."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    name: str
    label_text: str
    value: float

    @property
    def labels(self) -> dict[str, str]:
        return dict(_LABEL.findall(self.label_text))


def read_samples(page: str, engine: str | None = None, names: Container[str] | None = None) -> list[Sample]:
    """Return the samples of these names. `engine`: those of one data-parallel rank only. None: all with the prefix of a server.

    Lines that are too long are left out, and so are values that are negative, or that no server could have counted to, and what
    comes after 512 KiB of samples.
    """
    samples: list[Sample] = []
    left = _MAX_CHARS
    for line in StringIO(page):  # line by line: splitting a long page would keep the interpreter from other threads
        name = line[:brace] if (brace := line.find("{")) > 0 else line.partition(" ")[0]
        match = _SAMPLE.match(line) if (names is None or name in names) and len(line) <= _MAX_LINE_CHARS else None
        if match is None:
            continue
        sample = Sample(match[1], match[2] or "", float(match[3]))
        if engine is None or sample.labels.get("engine") == engine:
            left -= len(line)
            if left < 0:
                break
            samples.append(sample)
    return samples
