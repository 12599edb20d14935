"""What the request's tools say that parsers need to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.frontend.preprocess.parsers import Tools


def tool_names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schemas of a tool's parameters by their names; empty if nothing is known of them."""
    for tool in tools:
        if tool["function"]["name"] == name:
            schema = tool["function"].get("parameters")
            found = schema.get("properties") if isinstance(schema, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}
