"""Translate requests of the OpenAI API into text requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Sampling, Stop
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.common.names import InstanceId, parse_instance
from dynamo.frontend.api.http.json_scan import check_json
from dynamo.frontend.api.openai.custom_tools import function_call, tool_definition
from dynamo.frontend.api.openai.requests import (
    AllowedToolChoice,
    ChatMessage,
    ChatRequest,
    ChosenFunction,
    CompletionRequest,
    ContentPart,
    NamedCustomChoice,
    NamedToolChoice,
    NvExt,
    ResponseFormat,
    StructuredOutputs,
    TextGenerationRequest,
    Tool,
)
from dynamo.frontend.api.text.rules import check_chars, choose_parsers, llm_of, reasoning_limit, stop_strings
from dynamo.frontend.api.text.tool_choice import require_any_call, require_named_call
from dynamo.frontend.config import TextLimits
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.overrides import read_overrides
from dynamo.frontend.serving.call import Call

Named = TypeVar("Named", bound=TextGenerationRequest)

_MAX_ID_DIGITS = 10
_MANY_KEYS = 8
"""Wrong ones that an error names."""
_MAX_SCHEMA_DEPTH = 100
_MAX_SCHEMA_VALUES = 200_000


class RequestTemplate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults for requests that leave these fields out."""

    model: str = ""
    temperature: float | None = None
    max_completion_tokens: int | None = None


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request, as text requests for the data plane."""

    texts: tuple[TextRequest, ...]
    """One per prompt."""
    parsers: tuple[ParserKind, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    n: int = 1

    @property
    def alternatives(self) -> int:
        """How many tokens are listed beside each token with log probabilities."""
        text = self.texts[0]
        return len(text.logprob_token_ids) + 1 if text.logprob_token_ids else text.logprobs or 0


def chat_to_text(request: ChatRequest, card: ModelCard, parsers: OutputParsers, limits: TextLimits) -> PreparedRequest:
    """Prepare a chat completion. Raises InvalidRequest, Unsupported."""
    for name, message in request.unsupported_fields().items():
        raise InvalidRequest(message, param=name)
    llm = llm_of(card)
    if not request.logprobs and request.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot be combined", param="continue_final_message"
        )
    if (request.top_logprobs or 0) > limits.max_logprobs:
        raise _above("top_logprobs", request.top_logprobs, limits.max_logprobs)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    text = _common(request, limits, max_tokens, (request.top_logprobs or 0) if request.logprobs else None)
    tools, choice = _tools_to_call(request)
    parallel = request.parallel_tool_calls is not False
    forced: ParserKind | None = None
    if choice is not None and choice not in ("none", "auto"):
        if not tools:
            raise InvalidRequest("'tool_choice' requires a call, but there are no tools", param="tool_choice")
        guided, forced = (  # in place of another structure of the output, if the request has one
            require_named_call(choice.name, tools)
            if isinstance(choice, NamedToolChoice | NamedCustomChoice)
            else require_any_call(tools, parallel=parallel)
        )
        text = msgspec.structs.replace(text, sampling=msgspec.structs.replace(text.sampling, guided=guided))
    if choice == "none":
        tools = ()
    kinds = choose_parsers(
        card, parsers, forced, has_tools=bool(tools), guided=text.sampling.guided is not None, parallel=parallel
    )
    if (limited := _thinking_tokens(request)) is not None:
        max_tokens, param = limited
        text = msgspec.structs.replace(text, reasoning_limit=reasoning_limit(max_tokens, card, kinds, text, param))
    if any(kind.needs_special_tokens for kind in kinds):
        text = msgspec.structs.replace(text, skip_special_tokens=False)
    if (prompt := _replaced_prompt(request)) is not None:
        text = msgspec.structs.replace(text, prompt=prompt)
    else:
        messages, media = messages_to_text(request.messages, llm, limits)
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.documents is not None:
            variables.setdefault("documents", request.documents)
        text = msgspec.structs.replace(
            text,
            messages=messages,
            media=media,
            tools=tools,
            chat_template=request.chat_template or "",
            chat_template_kwargs=variables,
            add_generation_prompt=request.add_generation_prompt is not False,
            continues_last=bool(request.continue_final_message),
        )
    return PreparedRequest(texts=(text,), parsers=kinds, tools=tools, n=text.n)


def _thinking_tokens(request: TextGenerationRequest) -> tuple[int, str] | None:
    """Return the most tokens that reasoning may have, and the field that says so. Raises InvalidRequest."""
    limit = None if request.nvext is None else request.nvext.max_thinking_tokens
    budget = request.thinking_token_budget
    if limit is not None and budget is not None and limit != budget:
        raise InvalidRequest(
            "'thinking_token_budget' and 'nvext.max_thinking_tokens' contradict each other", param="thinking_token_budget"
        )
    if limit is not None:
        return limit, "nvext.max_thinking_tokens"
    return None if budget is None else (budget, "thinking_token_budget")


def completion_to_text(request: CompletionRequest, card: ModelCard, limits: TextLimits) -> PreparedRequest:
    """Prepare a plain completion. Raises InvalidRequest."""
    for name, message in request.unsupported_fields().items():
        raise InvalidRequest(message, param=name)
    llm_of(card)
    if (limited := _thinking_tokens(request)) is not None:
        raise InvalidRequest("reasoning can be limited in chat completions only: others are not parsed", param=limited[1])
    if request.suffix:
        raise InvalidRequest("'suffix' is not supported", param="suffix")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("'max_tokens' must be at least 1 without 'echo'", param="max_tokens")
    if (request.logprobs or 0) > limits.max_logprobs:
        raise _above("logprobs", request.logprobs, limits.max_logprobs)
    ranked = request.best_of is not None and request.best_of > (request.n or 1)
    alternatives = request.logprobs if request.logprobs is not None else 0 if ranked else None
    text = _common(request, limits, 16 if request.max_tokens is None else request.max_tokens, alternatives)
    if request.best_of is not None:
        if request.best_of > limits.max_best_of:
            raise _above("best_of", request.best_of, limits.max_best_of)
        if request.best_of < text.n:
            raise InvalidRequest(f"'best_of' is {request.best_of}; it must be at least 'n', which is {text.n}", param="best_of")
        if request.stream and ranked:
            raise InvalidRequest(
                "'best_of' above 'n' cannot be streamed: the best choice is only known at the end", param="best_of"
            )
        if ranked and text.sampling.temperature == 0:
            raise InvalidRequest("'best_of' needs a temperature above 0: at 0 all choices are the same", param="best_of")
    wants_prompt = request.echo and request.logprobs is not None
    if wants_prompt and request.stream:
        raise InvalidRequest(
            "'echo' with 'logprobs' cannot be streamed: the prompt's log probabilities are only known at the end", param="echo"
        )
    if ranked:
        text = msgspec.structs.replace(text, n=request.best_of)
    if wants_prompt:
        text = msgspec.structs.replace(text, prompt_logprobs=max(request.logprobs or 0, text.prompt_logprobs or 0))
    own_tokens = None if request.nvext is None else request.nvext.token_data
    prompts = prompts_of(request.prompt, "prompt") if own_tokens is None else [own_tokens]
    choices = len(prompts) * text.n
    if choices > limits.max_choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {text.n} choices each are more than {limits.max_choices}",
            param="prompt",
        )
    repeated = text.n if request.echo else 1
    check_chars(repeated * sum(map(len, prompts)), limits, "prompt")
    return PreparedRequest(texts=tuple([msgspec.structs.replace(text, prompt=prompt) for prompt in prompts]), n=text.n)


def messages_to_text(
    messages: Sequence[ChatMessage], llm: LlmInfo, limits: TextLimits
) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]:
    """Return a conversation as chat templates expect it, and its content parts that are not text. Raises InvalidRequest."""
    if len(messages) > limits.max_messages:
        raise InvalidRequest(f"got {len(messages)} messages; at most {limits.max_messages} are allowed", param="messages")
    conversation: list[dict[str, Any]] = []
    media: list[dict[str, Any]] = []
    chars, called = 0, ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "tool" and message.tool_call_id is None:
            raise InvalidRequest("a message of role 'tool' needs 'tool_call_id'", param=f"{where}.tool_call_id")
        plain: dict[str, Any] = msgspec.to_builtins(message)
        if (function := plain.pop("function_call", None)) is not None:
            called = f"call_{index}"
            plain["tool_calls"] = [{"id": called, "type": "function", "function": function}]
        elif message.role == "function" and called:  # the older form of what a tool has returned
            plain |= {"role": "tool", "tool_call_id": called}
        if message.content is None and message.role != "assistant":  # such as a tool without a result
            plain["content"] = ""
        if message.role == "developer":  # OpenAI's newer name; most templates only know the older one
            plain["role"] = "system"
        if isinstance(message.content, str):
            chars += len(message.content)
        if isinstance(message.content, list):
            plain["content"] = parts = _parts(message.content, llm, where)
            media += [part for part in parts if part["type"] != "text"]
            chars += sum(len(part["text"]) for part in parts if part["type"] == "text")
            if thoughts := "".join(part.thinking or "" for part in message.content if isinstance(part, ContentPart)):
                plain.setdefault("reasoning_content", thoughts)
        if "tool_calls" in plain:
            calls = [function_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(plain["tool_calls"])]
            plain["tool_calls"] = calls
        for call in plain.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = msgspec.json.encode(function["arguments"]).decode()
            chars += len(function["arguments"])
        conversation.append(plain)
    check_chars(chars, limits, "messages")
    return conversation, tuple(media)


def _parts(content: Sequence[ContentPart | str], llm: LlmInfo, where: str) -> list[dict[str, Any]]:
    """Return content parts as engines and templates expect them, without thoughts. Raises InvalidRequest."""
    result: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        if isinstance(part, str):
            result.append({"type": "text", "text": part})
            continue
        kind, path = _modality(part.type), f"{where}.content[{position}]"
        if getattr(part, part.field) is None:
            raise InvalidRequest(f"a content part of type '{part.type}' needs '{part.field}'", param=f"{path}.{part.field}")
        if part.type == "thinking":
            continue
        if kind == "text":
            result.append({"type": "text", "text": part.words})
        elif kind in llm.modalities:
            result.append(msgspec.to_builtins(msgspec.structs.replace(part, prompt_cache_breakpoint=None)))
        else:
            raise InvalidRequest(f"the model does not support content of type {kind}", param=path)
    return result


def last_words(request: ChatRequest) -> str:
    """Return the text of the last message if it is the assistant's."""
    message = request.messages[-1]
    if message.role != "assistant" or message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part if isinstance(part, str) else part.words for part in message.content)


def tools_to_text(tools: Sequence[Tool] | None) -> Sequence[Mapping[str, Any]]:
    """Return tools as chat templates expect them. Raises InvalidRequest if two have the same name."""
    definitions = [tool_definition(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    if len({each.name for each in definitions}) != len(definitions):
        raise InvalidRequest("two tools have the same name", param="tools")
    return [{"type": "function", "function": msgspec.to_builtins(each)} for each in definitions]


def with_tools(request: ChatRequest) -> ChatRequest:
    """Return the request with the older `functions` and `function_call` as `tools` and `tool_choice`. Raises InvalidRequest."""
    if request.functions is None:
        return request
    if request.tools is not None or request.tool_choice is not None:
        raise InvalidRequest("'functions' is the older form of 'tools': give only one of them", param="functions")
    choice = request.function_call
    return msgspec.structs.replace(
        request,
        tools=[Tool(type="function", function=function) for function in request.functions],
        tool_choice=NamedToolChoice(function=choice) if isinstance(choice, ChosenFunction) else choice,
        parallel_tool_calls=False,  # a message has one call in that form
    )


def _tools_to_call(
    request: ChatRequest,
) -> tuple[Sequence[Mapping[str, Any]], Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | None]:
    """Return the tools that the model may call, and whether it must. Raises InvalidRequest."""
    tools, choice = tools_to_text(request.tools), request.tool_choice
    if not isinstance(choice, AllowedToolChoice):
        return tools, choice
    allowed = {tool.name for tool in choice.allowed_tools.tools}
    if missing := allowed - {tool["function"]["name"] for tool in tools}:
        raise InvalidRequest(f"'tool_choice' names '{min(missing)}', which is not in 'tools'", param="tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in allowed], choice.allowed_tools.mode


def renamed(request: Named, model: str) -> Named:
    """Return the same request to another model."""
    return request if request.model == model else msgspec.structs.replace(request, model=model)


def call_of(request: TextGenerationRequest, call: Call) -> Call:
    """Return the call of a request: what headers say takes precedence over the body. Raises InvalidRequest."""
    if request.stream:
        call = msgspec.structs.replace(call, request_type=RequestType.STREAM)
    nvext = request.nvext
    priority = call.priority or request.priority or 0
    session = call.session or (nvext is not None and nvext.session_id) or request.session_id or ""
    if nvext is None:
        if not priority and not session:
            return call
        return msgspec.structs.replace(call, priority=priority, session=session)
    hinted = nvext.agent_hints.priority if nvext.agent_hints is not None else None
    overrides = call.overrides
    if nvext.router is not None:
        given = {name: value for name, value in msgspec.structs.asdict(nvext.router).items() if value is not None}
        overrides = {**read_overrides(given), **overrides}
    return msgspec.structs.replace(
        call,
        priority=priority or nvext.priority or hinted or 0,
        overrides=overrides,
        instance=_named_instance(
            call.instance, nvext.backend_instance_id if nvext.decode_worker_id is None else nvext.decode_worker_id
        ),
        prefill_instance=_named_instance(call.prefill_instance, nvext.prefill_worker_id),
        session=session,
    )


def _named_instance(by_header: InstanceId | None, by_body: str | None) -> InstanceId | None:
    return parse_instance(by_body) if by_header is None and by_body is not None else by_header


def _common(request: TextGenerationRequest, limits: TextLimits, max_tokens: int | None, alternatives: int | None) -> TextRequest:
    """`alternatives`: how many tokens are to be listed beside each generated one; None: no log probabilities are wanted."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' is only allowed with 'stream'", param="stream_options")
    if request.nvext is not None and request.nvext.annotations and not request.stream:
        raise InvalidRequest("'nvext.annotations' needs 'stream'", param="nvext.annotations")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest("'prompt_logprobs' cannot be streamed", param="prompt_logprobs")
    n = request.n or 1
    if n > limits.max_choices:
        raise _above("n", n, limits.max_choices)
    if (request.prompt_logprobs or 0) > limits.max_logprobs:
        raise _above("prompt_logprobs", request.prompt_logprobs, limits.max_logprobs)
    if n > 1 and request.temperature == 0:
        raise InvalidRequest("'n' above 1 needs a temperature above 0: at 0 all choices are the same", param="n")
    if request.logprob_token_ids:
        if alternatives is None:
            raise InvalidRequest("'logprob_token_ids' needs 'logprobs'", param="logprob_token_ids")
        if max_tokens == 0:
            raise InvalidRequest("'logprob_token_ids' needs a response, but 'max_tokens' is 0", param="logprob_token_ids")
        alternatives = 0
    return TextRequest(
        model=request.model or "",
        sampling=_sampling(request),
        stop=Stop(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
        ),
        stop_strings=() if request.stop is None else stop_strings(request.stop, limits),
        include_stop_string=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        n=n,
        logprobs=alternatives,
        logprob_token_ids=tuple(request.logprob_token_ids or ()),
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncates_end=request.truncation_side == "right",
        bad_words=tuple(request.bad_words or ()),
        prompt_logprobs=request.prompt_logprobs,
        cache_salt=request.cache_salt or "",
    )


def _sampling(request: TextGenerationRequest) -> Sampling:
    greedy = request.nvext is not None and bool(request.nvext.greed_sampling)
    return Sampling(
        temperature=0.0 if greedy else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        logit_bias=None if request.logit_bias is None else _biases(request.logit_bias),
        guided=guided_of(request),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words_token_ids=None if request.bad_words_token_ids is None else tuple(map(tuple, request.bad_words_token_ids)),
    )


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in biases if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS)]
    if wrong:
        shown = ", ".join(f"{key[:40]!r}" for key in wrong[:_MANY_KEYS])
        raise InvalidRequest(f"the keys of 'logit_bias' must be token ids, got {shown}", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def guided_of(request: TextGenerationRequest) -> dict[str, Any] | None:
    """Return the constraint on the output; None if there is none. Raises InvalidRequest."""
    constraints: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and (structure := to_guided(request.response_format)) is not None:
        constraints["response_format"] = structure
    if request.guided_json is not None:
        constraints["guided_json"] = {"json_schema": _schema(request.guided_json, "guided_json")}
    if request.guided_regex is not None:
        constraints["guided_regex"] = {"regex": request.guided_regex}
    if request.guided_choice is not None:
        constraints["guided_choice"] = {"choice": request.guided_choice}
    if request.guided_grammar is not None:
        constraints["guided_grammar"] = {"grammar": request.guided_grammar}
    if request.structured_outputs is not None:
        constraints["structured_outputs"] = _structured(request.structured_outputs)
    if len(constraints) > 1:
        raise InvalidRequest(f"{' and '.join(map(repr, constraints))} cannot be combined", param=list(constraints)[-1])
    return next(iter(constraints.values()), None)


def _structured(wanted: StructuredOutputs) -> dict[str, Any]:
    constraints: dict[str, Any] = {
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
        "json_object": wanted.json_object or None,
        "structural_tag": wanted.structural_tag,
    }
    if wanted.json is not None:
        constraints["json_schema"] = _schema(wanted.json, "structured_outputs.json")
    chosen = {name: value for name, value in constraints.items() if value is not None}
    if len(chosen) != 1:
        raise InvalidRequest(
            f"'structured_outputs' needs exactly one of json, json_object, regex, choice, grammar and structural_tag, "
            f"got {len(chosen)}",
            param="structured_outputs",
        )
    return chosen


def to_guided(wanted: ResponseFormat) -> dict[str, Any] | None:
    """Return the constraint for a response format; None for plain text. Raises InvalidRequest."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_object": True}
    if wanted.type == "structural_tag":
        return {"structural_tag": _structural_tag(wanted)}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise InvalidRequest("'response_format' of type 'json_schema' needs 'json_schema' with 'schema'", param="response_format")
    return {"json_schema": wanted.json_schema.schema}


def _structural_tag(wanted: ResponseFormat) -> str:
    tag = {"format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
    given = {name: value for name, value in tag.items() if value is not None}
    if given.keys() not in ({"format"}, {"structures", "triggers"}):
        raise InvalidRequest(
            "'response_format' of type 'structural_tag' needs 'format', or 'structures' and 'triggers'", param="response_format"
        )
    return msgspec.json.encode({"type": "structural_tag", **given}).decode()


def _schema(text: str | dict[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(text, str):
        return text
    check_json(text.encode(), max_depth=_MAX_SCHEMA_DEPTH, max_values=_MAX_SCHEMA_VALUES)  # the body's scan saw a string
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not a JSON schema: {error}", param=param) from None


def _above(name: str, value: int | None, most: int) -> InvalidRequest:
    return InvalidRequest(f"'{name}' must be at most {most}, got {value}", param=name)


def _modality(kind: str) -> str:
    return {"image_url": "image", "input_audio": "audio"}.get(kind, "text")


def _replaced_prompt(request: ChatRequest) -> str | Sequence[int] | None:
    nvext = request.nvext or NvExt()
    if nvext.token_data is not None:
        return nvext.token_data
    if not nvext.use_raw_prompt:
        return None
    content = request.messages[0].content
    if len(request.messages) != 1 or not isinstance(content, str):
        raise InvalidRequest("'nvext.use_raw_prompt' needs exactly one message with text content", param="nvext.use_raw_prompt")
    return content


def prompts_of(prompt: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """Return the prompts in one of OpenAI's four forms. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    kinds = {*map(type, prompt)}
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if len(kinds) == 1:
        return prompt  # type: ignore[return-value]
    raise InvalidRequest(f"'{param}' must not mix texts and token ids", param=param)
