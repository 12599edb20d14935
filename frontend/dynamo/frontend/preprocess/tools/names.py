"""Names and parameter schemas of a request's tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.frontend.preprocess.parsers import Tools


def tool_names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of each parameter of the tool `name`; empty if the tool or its schema is missing."""
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters")
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}
