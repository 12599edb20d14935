"""The parsers that model cards can name."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParsers

KNOWN_PARSERS = OutputParsers(tools={}, reasoning={})
