"""The samples on a page of metrics of an engine server."""

from __future__ import annotations

import re
from typing import NamedTuple

_SAMPLE = re.compile(r"^([a-z]+:\w+)(?:\{(.*)\})? ([0-9]{1,18}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)(?: \d+)?$")
_MAX_LINE_CHARS = 4096
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    name: str
    label_text: str
    value: float

    @property
    def labels(self) -> dict[str, str]:
        return dict(_LABEL.findall(self.label_text))


def read_samples(page: str, engine: str | None = None) -> list[Sample]:
    """Return the samples of names with the prefix of a server. `engine`: those of one data-parallel rank only; None: all.

    Lines that are too long are left out, and so are values that are negative, or that no server could have counted to.
    """
    samples: list[Sample] = []
    for line in page.splitlines():
        match = _SAMPLE.match(line) if len(line) <= _MAX_LINE_CHARS else None
        if match is None:
            continue
        sample = Sample(match[1], match[2] or "", float(match[3]))
        if engine is None or sample.labels.get("engine") == engine:
            samples.append(sample)
    return samples
