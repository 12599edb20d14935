"""Language models over KServe tensors: tensor requests to text requests; `text_responses` has the way back.

| input | datatype, elements | meaning |
|---|---|---|
| `text_input` | BYTES, any number | one prompt per element |
| `messages` | BYTES, any number | instead: one conversation per element, as JSON, for the model's chat template |
| `token_ids` | any integer type, any number | instead: the tokens of one prompt |
| `streaming` or `stream` | BOOL, 1 | one response per batch of tokens, over ModelStreamInfer |
| the names in `SETTINGS` | any number type, 1 | sampling; request parameters of the same names mean the same |
| `stop` | BYTES, any number | stop strings; as a parameter: one string, or a JSON array of strings |
| `chat` | BOOL, 1 | each prompt is a user's message, for the model's chat template |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from dynamo.common.errors import InvalidRequest, ModelNotFound
from dynamo.common.generation import Sampling, Stop
from dynamo.common.model_card import ModelCard
from dynamo.common.tensors.check import check_request_parameters, check_tensor_parameters
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import (
    Array,
    bf16_to_float32,
    check_contents,
    datatype_named,
    decode_bytes,
    element_count,
    filled_fields,
    to_numpy,
)
from dynamo.frontend.api.http.json_scan import check_json
from dynamo.frontend.preprocess.checks import media_in
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.protos.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
)

MAX_CHOICES = 128
"""Completion choices of all prompts of a request together."""
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_TEXT_BYTES = 16 * 2**20
"""All prompts of a request together: as many as one prompt may have characters by default."""
MAX_MESSAGES_BYTES = 4 * 2**20
"""The conversations of a request together, as JSON: as much as the other protocols take by default."""
MAX_MESSAGES_VALUES = 1_000_000
MAX_MESSAGES_DEPTH = 100
MAX_TOKENS = 2**31 - 1

Value: TypeAlias = bool | int | float | str | list[str]
Conversation: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SamplingSetting:
    """A sampling setting and its range."""

    integer: bool
    low: float
    high: float
    above: bool = False
    """`low` itself is not allowed."""

    def check(self, name: str, value: Value) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest(f"'{name}' must be a number", param=name)
        if self.integer and (not math.isfinite(value) or value != int(value)):
            raise InvalidRequest(f"'{name}' must be an integer, got {value}", param=name)
        if not self.low <= value <= self.high or (self.above and value == self.low):
            low = f"above {_number(self.low)}" if self.above else f"at least {_number(self.low)}"
            raise InvalidRequest(f"'{name}' is {value}; it must be {low} and at most {_number(self.high)}", param=name)
        return int(value) if self.integer else float(value)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


SETTINGS: Mapping[str, SamplingSetting] = {
    "max_tokens": SamplingSetting(True, 1, MAX_TOKENS),
    "min_tokens": SamplingSetting(True, 0, MAX_TOKENS),
    "temperature": SamplingSetting(False, 0, 2),
    "top_p": SamplingSetting(False, 0, 1, above=True),
    "top_k": SamplingSetting(True, -1, MAX_TOKENS),
    "min_p": SamplingSetting(False, 0, 1),
    "frequency_penalty": SamplingSetting(False, -2, 2),
    "presence_penalty": SamplingSetting(False, -2, 2),
    "repetition_penalty": SamplingSetting(False, 0, 10, above=True),
    "seed": SamplingSetting(True, -(2**63), 2**63 - 1),
    "n": SamplingSetting(True, 1, MAX_CHOICES),
    "logprobs": SamplingSetting(True, 0, 20),
}
FLAGS = frozenset(("ignore_eos", "chat"))
_STREAM = ("streaming", "stream")
_PASSED = frozenset(("triton_enable_empty_final_response", "priority", "timeout"))
"""Parameters that are read elsewhere, see TensorRequest."""
_ONE_INPUTS = frozenset((*SETTINGS, *FLAGS, *_STREAM))
IDS = "token_ids"
"""The name of an input and of an output."""
_INPUTS = frozenset((*_ONE_INPUTS, "text_input", "messages", "stop", IDS))
OUTPUTS = ("text_output", "finish_reason", "logprobs")
"""Outputs that are BYTES."""
MAX_TOKEN_IDS = 1 << 20
_INTEGERS = frozenset(("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"))


# Requests


def to_text_requests(request: TensorRequest, card: ModelCard) -> list[TextRequest]:
    """Return one text request per prompt, in the order of the prompts.

    Raises InvalidRequest, in one sentence naming the problem, and ModelNotFound for a version that is not served.
    """
    head = request.head
    if head.model_version and head.model_version not in card.versions:
        raise ModelNotFound(head.model_name, head.model_version)
    _check_outputs(head)
    _check_tokens(head, card)
    values = _parameters(head.parameters)
    prompts: list[str] = []
    conversations: list[Conversation] = []
    tokens: list[int] = []
    for name, elements in _inputs(request).items():
        if name == IDS:
            tokens = elements
        elif name == "text_input":
            prompts = [_text(element, name) for element in elements]
        elif name == "messages":
            conversations = _conversations(elements)
        elif name in values:
            raise InvalidRequest(f"'{name}' is given as an input and as a parameter", param=name)
        elif name == "stop":
            values[name] = [_text(element, name) for element in elements]
        else:
            values[name] = elements[0]
    if not prompts and not conversations and not tokens:
        raise InvalidRequest("the input 'text_input' is missing", param="text_input")
    if prompts and conversations:
        raise InvalidRequest("'text_input' and 'messages' are both given; send one of them", param="messages")
    if tokens and (prompts or conversations):
        raise InvalidRequest("'token_ids' is given beside a text; send one of them", param=IDS)
    if _flag(values, "chat") and prompts:
        conversations = [({"role": "user", "content": prompt},) for prompt in prompts]
    model = head.model_name
    settings = _settings(values)
    count = max(1, len(prompts), len(conversations))
    if count * settings.n > MAX_CHOICES:
        raise InvalidRequest(f"{count} prompts with {settings.n} choices each are above the {MAX_CHOICES} of one request")
    if count * settings.n > 1 and any(output.name == IDS for output in head.outputs):
        raise InvalidRequest("output 'token_ids' needs a request with one prompt and one choice")
    if tokens:
        return [msgspec.structs.replace(settings, model=model, prompt=tokens)]
    if conversations:
        return [
            msgspec.structs.replace(settings, model=model, messages=messages, media=media_in(messages))
            for messages in conversations
        ]
    return [msgspec.structs.replace(settings, model=model, prompt=prompt) for prompt in prompts]


def _check_tokens(head: ModelInferRequest, card: ModelCard) -> None:
    """Raise InvalidRequest for more tokens than the model's context has room for, before any is read."""
    for tensor in head.inputs:
        if tensor.name == IDS and card.llm is not None and math.prod(tensor.shape) >= card.llm.context_length:
            raise InvalidRequest(
                f"input '{IDS}' has the shape {list(tensor.shape)[:8]}; the model's context has {card.llm.context_length} tokens,"
                " of the response as well",
                param=IDS,
            )


def _settings(values: Mapping[str, Value]) -> TextRequest:
    """Return a text request with everything but its model and its prompt."""
    numbers = {name: setting.check(name, values[name]) for name, setting in SETTINGS.items() if name in values}
    whole = {name: int(number) for name, number in numbers.items() if SETTINGS[name].integer}
    max_tokens, min_tokens = whole.get("max_tokens"), whole.get("min_tokens", 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"'min_tokens' is {min_tokens}, above the 'max_tokens' of {max_tokens}", param="min_tokens")
    return TextRequest(
        model="",
        sampling=Sampling(
            temperature=numbers.get("temperature"),
            top_p=numbers.get("top_p"),
            top_k=whole.get("top_k"),
            min_p=numbers.get("min_p"),
            frequency_penalty=numbers.get("frequency_penalty"),
            presence_penalty=numbers.get("presence_penalty"),
            repetition_penalty=numbers.get("repetition_penalty"),
            seed=whole.get("seed"),
        ),
        stop=Stop(max_tokens=max_tokens, min_tokens=min_tokens, ignore_eos=_flag(values, "ignore_eos")),
        stop_strings=_stop_strings(values.get("stop")),
        n=whole.get("n", 1),
        logprobs=whole.get("logprobs"),
    )


def wants_stream(request: TensorRequest) -> bool:
    """Return whether the input or parameter `streaming` (or `stream`) is set. Raises InvalidRequest if it is malformed."""
    head = request.head
    for position, tensor in enumerate(head.inputs):
        if tensor.name in _STREAM:
            raw = request.raw_inputs[position] if position < len(request.raw_inputs) else None
            return bool(_elements(tensor, raw, tensor.name)[0])
    return any(_flag({name: _value(head.parameters[name])}, name) for name in _STREAM if name in head.parameters)


def _inputs(request: TensorRequest) -> dict[str, list[Any]]:
    """Return the elements of each input by its name: bytes of text inputs, numbers and bools of the others."""
    tensors, raws = request.head.inputs, request.raw_inputs
    if raws and len(raws) != len(tensors):
        raise InvalidRequest(f"raw_input_contents has {len(raws)} entries for {len(tensors)} inputs")
    elements_by_name: dict[str, list[Any]] = {}
    for position, tensor in enumerate(tensors):
        name = tensor.name
        if name not in _INPUTS:
            raise InvalidRequest(
                f"a language model has no input '{name[:80]}'; it has 'text_input', 'streaming', 'messages', 'token_ids',"
                " 'stop', and sampling settings",
                param=name[:80],
            )
        if name in elements_by_name:
            raise InvalidRequest(f"input '{name}' is given twice", param=name)
        elements_by_name[name] = _elements(tensor, raws[position] if raws else None, name)
    if "streaming" in elements_by_name and "stream" in elements_by_name:
        raise InvalidRequest("'streaming' and 'stream' mean the same; send one of them", param="stream")
    for name in _STREAM:
        elements_by_name.pop(name, None)
    return elements_by_name


_MAX_ELEMENTS = {"text_input": MAX_CHOICES, "messages": MAX_CHOICES, "stop": MAX_STOP_STRINGS}
_MAX_BYTES = {
    "text_input": MAX_TEXT_BYTES,
    "messages": MAX_MESSAGES_BYTES,
    "stop": MAX_STOP_STRINGS * MAX_STOP_CHARS * 4,  # of UTF-8
}
"""Bytes of all elements of an input together, without their lengths, at most."""
_TEXT = frozenset(_MAX_BYTES)
_BOOL = frozenset((*FLAGS, *_STREAM))


def _elements(tensor: ModelInferRequest.InferInputTensor, raw: bytes | bytearray | memoryview | None, name: str) -> list[Any]:
    """Return the elements of one input. Raises InvalidRequest for a wrong datatype, shape or contents."""
    what = f"input '{name}'"
    if tensor.parameters:
        check_tensor_parameters(tensor.parameters, what)
    datatype_named(tensor.datatype, what)
    if name in _TEXT:
        if tensor.datatype != "BYTES":
            raise InvalidRequest(f"{what} has the datatype {tensor.datatype}; it must be BYTES", param=name)
    elif name == IDS:
        if tensor.datatype not in _INTEGERS:
            raise InvalidRequest(f"{what} has the datatype {tensor.datatype}; it must be that of integers", param=name)
    elif name in _BOOL:
        if tensor.datatype != "BOOL":
            raise InvalidRequest(f"{what} has the datatype {tensor.datatype}; it must be BOOL", param=name)
    elif tensor.datatype in ("BYTES", "BOOL"):
        raise InvalidRequest(f"{what} has the datatype {tensor.datatype}; it must be a number", param=name)
    count = element_count(tensor.shape, what)
    if name in _ONE_INPUTS and count != 1:
        raise InvalidRequest(f"{what} has the shape {list(tensor.shape)}; it must have one element", param=name)
    if name in _TEXT and count > _MAX_ELEMENTS[name]:
        raise InvalidRequest(f"{what} has {count} elements; at most {_MAX_ELEMENTS[name]} are allowed", param=name)
    if name in _TEXT and (count == 0 or sum(size != 1 for size in tensor.shape) > 1):
        raise InvalidRequest(f"{what} has the shape {list(tensor.shape)}; it must be [n] or [n, 1]", param=name)
    if name == IDS and (not 0 < count <= MAX_TOKEN_IDS or sum(size != 1 for size in tensor.shape) > 1):
        raise InvalidRequest(
            f"{what} has the shape {list(tensor.shape)}; it must be [n] or [1, n], n from 1 to {MAX_TOKEN_IDS}", param=name
        )
    contents = tensor.contents if tensor.HasField("contents") else None
    if raw is None:
        if contents is None:
            raise InvalidRequest(f"{what} has no data, neither in contents nor in raw_input_contents", param=name)
        kind = datatype_named(tensor.datatype, what)
        check_contents(contents, kind, count, what)
        elements: list[Any] = list(getattr(contents, kind.field))
        if name in _TEXT:
            _check_bytes(sum(map(len, elements)), name)
        return elements
    if contents is not None and filled_fields(contents):
        raise InvalidRequest(f"{what} has contents although the request has raw_input_contents", param=name)
    if name in _TEXT:
        _check_bytes(len(raw) - 4 * count, name)  # before it is copied
    if tensor.datatype == "BYTES":
        return [bytes(raw)] if name == "text_input" and count == 1 and _is_bare(raw) else decode_bytes(raw, count, what)
    array: Array = to_numpy(raw, tensor.datatype, (count,), what)
    if tensor.datatype == "BF16":
        array = bf16_to_float32(array)
    numbers: list[Any] = array.tolist()
    return numbers


def _check_bytes(size: int, name: str) -> None:
    if size > _MAX_BYTES[name]:
        raise InvalidRequest(f"input '{name}' has {size} bytes; at most {_MAX_BYTES[name]} are allowed", param=name)


def _is_bare(raw: bytes | bytearray | memoryview) -> bool:
    """Return whether a prompt is given without its length, as some examples of clients do.

    Any length that is allowed, right or wrong, has a zero among its four bytes, and text has none.
    """
    length = bytes(raw[:4])
    return len(length) > 0 and 0 not in length


def _parameters(parameters: Mapping[str, InferParameter]) -> dict[str, Value]:
    """Return the settings among the parameters, by name. Raises InvalidRequest for an unknown parameter."""
    if not parameters:
        return {}
    check_request_parameters(parameters, more=("uint64_param",))
    values: dict[str, Value] = {}
    for name, parameter in parameters.items():
        if name in SETTINGS or name in FLAGS or name == "stop":
            values[name] = _value(parameter)
        elif name not in _PASSED and name not in _STREAM:
            raise InvalidRequest(f"a language model has no parameter '{name[:80]}'", param=name[:80])
    return values


def _value(parameter: InferParameter) -> Value:
    kind = parameter.WhichOneof("parameter_choice")
    value: Value = getattr(parameter, kind) if kind else ""
    return value


def _flag(values: Mapping[str, Value], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false", param=name)
    return value


def _text(element: bytes, name: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{name}' is not UTF-8 at byte {error.start}", param=name) from None


def _stop_strings(value: Value | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = _json_strings(value) if value.startswith("[") else [value]
    if not isinstance(value, list):
        raise InvalidRequest("'stop' must be a string, or a JSON array of strings", param="stop")
    if len(value) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"'stop' has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in value:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a string of 'stop' has {len(text)} characters; it must have 1 to {MAX_STOP_CHARS}", param="stop"
            )
    return tuple(value)


_MAX_STOP_JSON_CHARS = MAX_STOP_STRINGS * (MAX_STOP_CHARS * len(r"\ud83d\ude00") + len('"",'))
"""The longest JSON array of stop strings that is allowed, with each character escaped."""


def _json_strings(text: str) -> list[str]:
    """Return a JSON array of strings; any other text as a single string."""
    if len(text) > _MAX_STOP_JSON_CHARS:
        raise InvalidRequest(f"'stop' has {len(text)} characters; at most {_MAX_STOP_JSON_CHARS} are allowed", param="stop")
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError:
        return [text]


class _TemplateMessage(msgspec.Struct):
    """The fields of a chat message that templates require."""

    role: str
    content: str | list[dict[str, Any]] | None = None


def _conversations(elements: Sequence[bytes]) -> list[Conversation]:
    """Return all conversations of a request. They are bounded before the first one is decoded. Raises InvalidRequest."""
    for element in elements:
        check_json(
            element,
            max_depth=MAX_MESSAGES_DEPTH,
            max_values=MAX_MESSAGES_VALUES // len(elements),
            what="a conversation of input 'messages'",
        )
    return [_conversation(element) for element in elements]


def _conversation(element: bytes) -> Conversation:
    try:
        typed = msgspec.json.decode(element, type=list[_TemplateMessage])
        conversation: Conversation = msgspec.json.decode(element)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"input 'messages' is not a JSON array of messages: {error}", param="messages") from None
    if not typed:
        raise InvalidRequest("input 'messages' has an empty conversation", param="messages")
    return conversation


def _check_outputs(head: ModelInferRequest) -> None:
    seen: set[str] = set()
    for output in head.outputs:
        if output.name not in (*OUTPUTS, IDS):
            raise InvalidRequest(
                f"a language model has no output '{output.name[:80]}'; it has 'text_output', 'finish_reason', 'logprobs' and"
                " 'token_ids'"
            )
        if output.name in seen:
            raise InvalidRequest(f"output '{output.name}' is requested twice")
        if output.name == "logprobs" and not _is_set(head, "logprobs"):
            raise InvalidRequest("output 'logprobs' is requested, but no setting 'logprobs' says how many")
        seen.add(output.name)
        check_tensor_parameters(output.parameters, f"output '{output.name}'")
        if "classification" in output.parameters:
            raise InvalidRequest(f"output '{output.name}' is BYTES and cannot be classified")


def _is_set(head: ModelInferRequest, name: str) -> bool:
    return name in head.parameters or any(tensor.name == name for tensor in head.inputs)
