"""A language model that takes text and yields text: no tokenizer, no chat template.

    dynamo-worker --model examples/shout.py:Shout

It says the last message in capitals, or calls the first tool that a message mentions with `use`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from dynamo.worker.engine.python_text import FinishReason, Summary, TextGeneration


class Shout:
    name = "shout"
    tool_parser = "hermes"
    modalities = ("image",)

    async def generate(self, request: TextGeneration) -> AsyncIterator[str | FinishReason | Summary]:
        text = request.last_message
        names = [tool["function"]["name"] for tool in request.tools]
        if (name := next((name for name in names if f"use {name}" in text), None)) is not None:
            yield f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>"
            return
        words = [word.upper() for word in text.split(" ")]
        for count, word in enumerate(words):
            if count == request.max_tokens:
                yield FinishReason.LENGTH
                break
            yield word if count == 0 else f" {word}"
        yield Summary(prompt_tokens=len(words), output_tokens=min(len(words), request.max_tokens or len(words)))
