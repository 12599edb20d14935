"""The table of fields in `docs/openai.md` names the fields that requests have here."""

from __future__ import annotations

import re
from pathlib import Path

from dynamo.frontend.api.openai.requests import ChatRequest, CompletionRequest
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest

PAGE = Path(__file__).parents[5] / "docs" / "openai.md"
ROW = re.compile(r"^\| `(\w+)` \| [CTR –]+ \| [CTR –]+ \| ([CTR –]+) \|", re.MULTILINE)
APIS = {"C": ChatRequest, "T": CompletionRequest, "R": ResponsesRequest}


def test_the_table_of_fields_says_which_requests_have_them() -> None:
    listed = {name: set(letters) & set("CTR") for name, letters in ROW.findall(PAGE.read_text())}
    had: dict[str, set[str]] = {}
    for letter, kind in APIS.items():
        for field in kind.__struct_fields__:
            had.setdefault(field, set()).add(letter)
    assert {name: letters for name, letters in listed.items() if letters} == had
