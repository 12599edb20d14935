"""OpenAI's chat and text completions as any server has them: messages or a prompt in, text out.

Calls and reasoning that the server has parsed are written as text again, in the formats `TOOL_PARSER` and `REASONING_PARSER` that
frontends parse: so they reach clients of every protocol.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, GenerateRequest, Summary, TokenCount
from dynamo.common.generation_rules import Feature, check_features
from dynamo.common.generation_rules import check_request as check_ranges
from dynamo.worker.engine.open_requests import read_finish_reason
from dynamo.worker.engine.remote.dialect import Choices, PromptDetails, check_rank, decode_event, without_none
from dynamo.worker.engine.remote.errors import ServerError, stream_error
from dynamo.worker.engine.sampling import choice_seed, sampling_fields
from dynamo.worker.engine.text_prompt import read_prompt
from dynamo.worker.engine.vllm.request import structured_settings

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOOL_PARSER = "hermes"
REASONING_PARSER = "qwen3"
_FEATURES = frozenset({Feature.GUIDED, Feature.ADAPTER, Feature.MEDIA})
_THINK, _END_THINK = "<think>", "</think>"


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    index: int = 0
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class TextChoice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: Message | None = None
    finish_reason: str | None = None


class TextUsage(msgspec.Struct):
    prompt_tokens: TokenCount = 0
    completion_tokens: TokenCount = 0
    prompt_tokens_details: PromptDetails | None = None


class TextChunk(msgspec.Struct):
    choices: list[TextChoice] = []
    usage: TextUsage | None = None
    error: ServerError | str | None = None


_chunk_decoder = msgspec.json.Decoder(TextChunk)


class TextDialect:
    """A server that is compatible with OpenAI: llama.cpp's, Ollama, TGI, and many others."""

    def __init__(self, model: str) -> None:
        self._model = model

    def call(self, request: GenerateRequest) -> tuple[str, bytes]:
        check_ranges(request)
        check_features(request, "remote", _FEATURES)
        check_rank(request)
        _check_stop(request)
        sampling = request.sampling
        prompt = read_prompt(request)
        fields = {
            "model": request.adapter or self._model,
            "prompt": prompt.prompt,
            "messages": prompt.messages,
            "tools": prompt.tools or None,
            "chat_template_kwargs": prompt.template_variables or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": request.n if request.n > 1 else None,
            "max_tokens": request.stop.max_tokens,
            **sampling_fields(sampling),
            "seed": choice_seed(request),
            "response_format": _response_format(structured_settings(sampling.guided)) if sampling.guided else None,
        }
        path = CHAT_PATH if prompt.prompt is None else COMPLETIONS_PATH
        return path, msgspec.json.encode(without_none(fields))

    def reader(self, request: GenerateRequest) -> TextReader:
        return TextReader(request)


def _check_stop(request: GenerateRequest) -> None:
    """Raises InvalidRequest for conditions in tokens, which the server does not have."""
    stop = request.stop
    for name, is_set in (
        ("min_tokens", stop.min_tokens > 0),
        ("ignore_eos", stop.ignore_eos),
        ("stop_token_ids", bool(stop.token_ids)),
    ):
        if is_set:
            raise InvalidRequest(f"{name} is not supported by a server that takes text", param=name)


def _response_format(settings: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's `response_format`. Raises InvalidRequest for what it does not have."""
    [(kind, value)] = settings.items()
    match kind:
        case "json":
            return {"type": "json_schema", "json_schema": {"name": "output", "schema": value, "strict": True}}
        case "json_object":
            return {"type": "json_object"}
        case _:
            raise InvalidRequest(f"structured output by '{kind}' is not supported by a server that takes text", param=kind)


class TextReader:
    """Reads the events of one stream; see `EventReader`."""

    def __init__(self, request: GenerateRequest) -> None:
        self._choices = Choices(request)
        # With structured output frontends expect nothing else: they do not look for reasoning.
        with_reasoning = request.sampling.guided is None
        self._writers = [_MessageWriter(with_reasoning=with_reasoning) for _ in range(request.n)]
        self._usage = TextUsage()

    @property
    def has_finished(self) -> bool:
        return self._choices.has_finished

    @property
    def unfinished(self) -> list[int]:
        """The choices that have not ended."""
        return self._choices.unfinished

    def read(self, event: bytes) -> list[Delta]:
        chunk = decode_event(_chunk_decoder, event)
        if chunk.error is not None:
            raise stream_error(ServerError(message=chunk.error) if isinstance(chunk.error, str) else chunk.error)
        self._usage = chunk.usage or self._usage
        return [delta for choice in chunk.choices if (delta := self._delta(choice)) is not None]

    def summary(self) -> Summary:
        details = self._usage.prompt_tokens_details
        return Summary(
            prompt_tokens=self._usage.prompt_tokens,
            output_tokens=self._usage.completion_tokens,
            cached_tokens=0 if details is None else details.cached_tokens or 0,
            prefill_ms=self._choices.prefill_ms,
        )

    def _delta(self, choice: TextChoice) -> Delta | None:
        index = choice.index
        if not self._choices.goes_on(index):
            return None  # some servers have a last event of a choice after its end
        writer = self._writers[index]
        text = choice.text or ("" if choice.delta is None else writer.write(choice.delta))
        if not choice.finish_reason:
            return Delta(index=index, text=text) if text else None
        reason = read_finish_reason(choice.finish_reason, "the server")
        self._choices.finish(index)
        return Delta(index=index, text=text + writer.close(), finish_reason=reason)


class _MessageWriter:
    """Writes the message of one choice as the text that parsers expect."""

    def __init__(self, *, with_reasoning: bool) -> None:
        self._with_reasoning = with_reasoning
        self._is_reasoning = False
        self._call: int | None = None
        """The call that is being written."""
        self._has_arguments = False

    def write(self, message: Message) -> str:
        is_content = not (message.reasoning_content or message.reasoning or message.tool_calls)
        if message.content and is_content and self._call is None and not self._is_reasoning:
            return message.content
        text = ""
        if (reasoning := message.reasoning_content or message.reasoning) and self._with_reasoning:
            text += reasoning if self._is_reasoning else f"{self.close()}{_THINK}{reasoning}"
            self._is_reasoning = True
        if message.content:
            text += f"{self.close()}{message.content}"
        for call in message.tool_calls or ():
            text += self._write_call(call)
        return text

    def _write_call(self, call: ToolCall) -> str:
        text = ""
        if self._call != call.index:
            name = msgspec.json.encode(call.function.name or "").decode()
            text = f'{self.close()}<tool_call>{{"name": {name}, "arguments": '
            self._call, self._has_arguments = call.index, False
        if call.function.arguments:
            self._has_arguments = True
            text += call.function.arguments
        return text

    def close(self) -> str:
        """Return the end of the reasoning, or of the call, that was being written."""
        if self._is_reasoning:
            self._is_reasoning = False
            return _END_THINK
        if self._call is None:
            return ""
        self._call = None
        return "}</tool_call>" if self._has_arguments else "{}}</tool_call>"
