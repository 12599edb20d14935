"""A language model written as a Python class: a prompt or a conversation in, text out.

    class Shout:
        context_length = 8192                             # optional, as are: name, modalities, tool_parser, reasoning_parser

        def load(self) -> None: ...                       # optional; plain or async, as is close()
        async def generate(self, request):                # a TextGeneration
            for word in request.last_message.upper().split():
                yield word + " "

`generate` is an async generator that runs on the event loop, any number at once; leaving a request early closes it. Last it may
yield a `FinishReason` (default: stop) and a `Summary` with numbers of tokens; without these a yielded text counts as one token.

`modalities`, such as ("image",), lists the content parts besides text that the model takes. A class that writes tool calls
itself, for the tools in `request.tools`, names their format as `tool_parser`; for others, tools are described in the system
message.
To refuse a request raise `InvalidRequest`; any other exception is logged and sent as an `EngineError` with its type and text.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Summary
from dynamo.common.generation_rules import Feature, check_features
from dynamo.common.model_card import TAKES_TEXT, LlmInfo, ModelCard, ModelKind
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.engine.open_requests import OpenRequests
from dynamo.worker.engine.text_prompt import read_prompt
from dynamo.worker.engine.user_class import call_hook, guarded, snake_case

__all__ = ["FinishReason", "InvalidRequest", "PythonTextEngine", "Summary", "TextGeneration"]

log = logging.getLogger(__name__)

_SUPPORTED = frozenset({Feature.MEDIA, Feature.ADAPTER, Feature.CACHE_SALT})


@dataclass(frozen=True, slots=True)
class TextGeneration:
    """A request for text. Exactly one of `prompt` and `messages` is set."""

    request_id: str
    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    """As in OpenAI's chat completions."""
    tools: Sequence[Mapping[str, Any]]
    template_variables: Mapping[str, Any]
    """What the request sets for a chat template."""
    max_tokens: int | None
    sampling: Sampling
    """None in a field: the model's own default."""

    @property
    def last_message(self) -> str:
        """The text of the last message, or the prompt."""
        if self.messages is None:
            return self.prompt or ""
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content if part.get("type") == "text")


class PythonTextEngine:
    """Serves one user's class as one language model."""

    def __init__(self, make: Callable[[], Any], *, name: str = "", context_length: int | None = None) -> None:
        """`make` creates the model, in a thread; `name` and `context_length` replace the class's own."""
        self._make = make
        self._name = name
        self._context_length = context_length
        self._model: Any = None
        self._requests = OpenRequests()

    def __repr__(self) -> str:
        return f"<PythonTextEngine {self._name}, open={self._requests.choices}>"

    async def start(self) -> ModelCard:
        model = self._model = await asyncio.to_thread(guarded, self._make)
        await call_hook(model, "load")
        self._name = self._name or getattr(model, "name", "") or snake_case(type(model).__name__)
        if not inspect.isasyncgenfunction(model.generate):
            raise InvalidRequest(f"'generate' of model '{self._name}' must be an async generator: 'async def' with 'yield'")
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            backend="python",
            llm=LlmInfo(
                context_length=self._context_length or int(getattr(model, "context_length", 0)),
                tokenizer=TAKES_TEXT,
                modalities=tuple(getattr(model, "modalities", ())),
                tool_parser=getattr(model, "tool_parser", ""),
                reasoning_parser=getattr(model, "reasoning_parser", ""),
            ),
        ).check()

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        check_features(request, "python", _SUPPORTED)
        if request.n > 1:
            raise InvalidRequest(f"n must be 1 for model '{self._name}', got {request.n}", param="n")
        prompt = read_prompt(request)
        generation = TextGeneration(
            request_id=context.request_id,
            prompt=prompt.prompt,
            messages=prompt.messages,
            tools=prompt.tools,
            template_variables=prompt.template_variables,
            max_tokens=request.stop.max_tokens,
            sampling=request.sampling,
        )
        reason, summary = FinishReason.STOP, Summary()
        with self._requests.opened(request) as opened:
            async with aclosing(self._items(generation)) as items:
                async for item in items:
                    opened.prefilled()
                    match item:
                        case FinishReason():
                            reason = item
                        case Summary():
                            summary = item
                        case str():
                            yield Delta(text=item)
                        case _:
                            raise EngineError(f"model '{self._name}' yielded a {type(item).__name__} instead of text")
        yield Delta(finish_reason=reason)
        yield summary

    async def _items(self, generation: TextGeneration) -> AsyncGenerator[Any, None]:
        """Yield what the model yields. Raises EngineError for an error of the model."""
        try:
            async with aclosing(self._model.generate(generation)) as items:
                async for item in items:
                    yield item
        except DynamoError:
            raise
        except Exception as error:
            log.exception("model '%s' failed", self._name)
            text = str(error)
            raise EngineError(f"model '{self._name}' failed: {type(error).__name__}{f': {text}' if text else ''}") from error

    def load(self) -> EngineLoad:
        choices = self._requests.choices
        return EngineLoad(running=choices, queued_prefill_tokens=self._requests.prefilling_tokens)

    async def close(self) -> None:
        if self._model is not None:
            await call_hook(self._model, "close")


def generates_text(model_class: type[Any]) -> bool:
    """Whether a user's class is a language model rather than one of tensors."""
    return hasattr(model_class, "generate") and not hasattr(model_class, "infer")
