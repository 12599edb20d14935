"""No single request keeps a frontend from serving the others, however it is made."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.held import MAX_HELD_S, held_s
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

pytestmark = pytest.mark.slow

MIB = 2**20
PLAIN_BYTES = 4 * MIB - 1024
"""For bodies of one long text, of which there is nothing to count."""


def filled(head: bytes, piece: bytes, tail: bytes, size: int = 40 * MIB) -> bytes:
    """A body of `size` bytes at most, with `piece` as often as it fits between `head` and `tail`."""
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


COMPLETION = b'{"model":"echo-llm","max_tokens":1,'
MESSAGE = b'{"role":"user","content":"a"}'
CHAT = b'{"model":"echo-llm","max_tokens":1,"messages":[' + MESSAGE + b"],"
MODEL = b'{"model":"echo-llm",'


def attacks() -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, path and body of each attack; a body is made when it is due, since together they have 800 MB."""
    yield "lists in template variables", "/v1/chat/completions", filled(CHAT + b'"chat_template_kwargs":{"a":[', b"[],", b"0]}}")
    yield (
        "lists in template variables, within the bound",
        "/v1/chat/completions",
        filled(CHAT + b'"chat_template_kwargs":{"a":[', b"[],", b"0]}}", 330_000),
    )
    yield (
        "keys in template variables",
        "/v1/chat/completions",
        CHAT + b'"chat_template_kwargs":{' + b",".join(b'"%d":0' % number for number in range(110_000)) + b"}}",
    )
    yield "long numbers", "/v1/chat/completions", filled(CHAT + b'"chat_template_kwargs":{"a":[', b"9" * 4299 + b",", b"0]}}")
    yield "nested lists", "/v1/chat/completions", CHAT + b'"chat_template_kwargs":{"a":' + b"[" * MIB + b"]" * MIB + b"}}"
    yield "an unknown field", "/v1/completions", filled(COMPLETION + b'"zz":[', b"[],", b"0]}")
    yield (
        "a schema",
        "/v1/chat/completions",
        filled(CHAT + b'"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"a":[', b"{},", b"0]}}}}"),
    )
    yield "messages", "/v1/chat/completions", filled(MODEL + b'"messages":[', MESSAGE + b",", MESSAGE + b"]}")
    yield "16,384 messages", "/v1/chat/completions", MODEL + b'"messages":[' + b",".join([MESSAGE] * 16_384) + b"]}"
    yield (
        "parts of a message",
        "/v1/chat/completions",
        MODEL + b'"messages":[{"role":"user","content":[' + b",".join([b'{"type":"text","text":"a"}'] * 41_000) + b"]}]}",
    )
    yield "items of a response", "/v1/responses", MODEL + b'"input":[' + b",".join([MESSAGE] * 30_000) + b"]}"
    yield "messages of Anthropic", "/v1/messages", MODEL + b'"max_tokens":1,"messages":[' + b",".join([MESSAGE] * 16_384) + b"]}"
    yield "messages to count", "/v1/messages/count_tokens", MODEL + b'"messages":[' + b",".join([MESSAGE] * 16_384) + b"]}"
    yield "one-token prompts", "/v1/completions", filled(COMPLETION + b'"prompt":[', b"[1],", b"[1]]}")
    yield "token ids", "/v1/completions", filled(COMPLETION + b'"prompt":[', b"1,", b"1]}")
    yield "token ids, within the bound", "/v1/completions", filled(COMPLETION + b'"prompt":[', b"1,", b"1]}", 2_000_000)
    yield "a prompt of words", "/v1/completions", filled(COMPLETION + b'"prompt":"', b"ab ", b'"}', PLAIN_BYTES)
    yield "a prompt of spaces", "/v1/completions", filled(COMPLETION + b'"prompt":"', b" ", b'"}', PLAIN_BYTES)
    yield "a prompt of escapes", "/v1/completions", filled(COMPLETION + b'"prompt":"', b"\\n", b'"}', PLAIN_BYTES)
    yield "a prompt of brackets", "/v1/completions", filled(COMPLETION + b'"prompt":"', b"[{,:", b'"}', PLAIN_BYTES)
    yield "stop strings", "/v1/completions", filled(COMPLETION + b'"prompt":"x","stop":[', b'"a",', b'"b"]}')
    yield "a stop string", "/v1/completions", filled(COMPLETION + b'"prompt":"x","stop":"', b"a", b'"}', PLAIN_BYTES)
    yield (
        "biases",
        "/v1/completions",
        COMPLETION + b'"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}}",
    )
    yield (
        "a schema in a string",
        "/v1/chat/completions",
        filled(CHAT + b'"guided_json":"{\\"a\\":[', b"[],", b'0]}"}', PLAIN_BYTES),
    )
    yield (
        "arguments in a string",
        "/v1/chat/completions",
        (
            filled(
                MODEL + b'"messages":[{"role":"assistant","tool_calls":[{"id":"1","type":"function","function":'
                b'{"name":"f","arguments":"{\\"a\\":[',
                b"[],",
                b'0]}"}}]}]}',
                PLAIN_BYTES,
            )
        ),
    )
    yield (
        "calls",
        "/v1/responses",
        (
            MODEL
            + b'"input":['
            + b",".join([b'{"type":"function_call","call_id":"1","name":"f","arguments":"{}"}'] * 20_000)
            + b"]}"
        ),
    )
    yield "128 prompts", "/v1/completions", COMPLETION + b'"prompt":[' + b",".join([b'"' + b"ab " * 10_000 + b'"'] * 128) + b"]}"
    yield (
        "stop strings of many choices",
        "/v1/completions",
        (
            COMPLETION
            + b'"prompt":"x","n":128,"temperature":1,"stop":['
            + b",".join(b'"' + b"a" * 1000 + b'%d"' % number for number in range(32))
            + b"]}"
        ),
    )
    yield (
        "tools with schemas, of which one must be called",
        "/v1/chat/completions",
        (
            CHAT
            + b'"tool_choice":"required","tools":['
            + b",".join(
                b'{"type":"function","function":{"name":"f%d","parameters":{"properties":{%s}}}}'
                % (number, b",".join(b'"p%d":{"type":"string"}' % name for name in range(30)))
                for number in range(1000)
            )
            + b"]}"
        ),
    )
    yield (
        "tools",
        "/v1/chat/completions",
        CHAT + b'"tools":[' + b",".join([b'{"type":"function","function":{"name":"f"}}'] * 20_000) + b"]}",
    )
    yield (
        "prompts to echo",
        "/v1/completions",
        filled(COMPLETION + b'"echo":true,"n":128,"temperature":1,"prompt":"', b"a", b'"}', MIB),
    )
    yield "text to tokenize", "/tokenize", filled(MODEL + b'"prompt":"', b"ab cd ", b'"}', PLAIN_BYTES)
    yield (
        "text to tokenize, with strings",
        "/tokenize",
        filled(MODEL + b'"return_token_strs":true,"prompt":"', b"ab cd ", b'"}', 900_000),
    )
    yield "messages to tokenize", "/tokenize", MODEL + b'"messages":[' + b",".join([MESSAGE] * 16_384) + b"]}"
    yield "ids to detokenize", "/detokenize", filled(MODEL + b'"tokens":[', b"1,", b"1]}")
    yield "ids to detokenize, within the bound", "/detokenize", filled(MODEL + b'"tokens":[', b"70,", b"1]}", 2_900_000)
    yield (
        "conversations of KServe",
        "/v2/models/echo-llm/infer",
        (
            filled(
                b'{"parameters":{"max_tokens":1},"inputs":[{"name":"messages","datatype":"BYTES","shape":[1],"data":["[{\\"role\\":'
                b'\\"user\\",\\"content\\":[',
                b"{},",
                b'{}]}]"]}]}',
            )
        ),
    )
    yield (
        "stop strings of KServe, in a string",
        "/v2/models/echo-llm/infer",
        (
            filled(
                b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[1],"data":["a"]}],"parameters":{"max_tokens":1,"stop":"[',
                b'\\"a\\",',
                b'\\"b\\"]"}}',
            )
        ),
    )
    yield (
        "fields to generate with",
        "/v2/models/echo-llm/generate",
        b'{"text_input":"a",' + b",".join(b'"%d":0' % number for number in range(110_000)) + b"}",
    )
    yield (
        "log probabilities of many choices",
        "/v1/chat/completions",
        (
            b'{"model":"sim","messages":['
            + MESSAGE
            + b'],"n":128,"temperature":1,"max_tokens":100,"logprobs":true,"top_logprobs":20}'
        ),
    )
    yield (
        "log probabilities of many choices, streamed",
        "/v1/completions",
        b'{"model":"sim","prompt":"a","n":128,"temperature":1,"max_tokens":100,"logprobs":20,"stream":true}',
    )
    yield "texts to embed", "/v1/embeddings", filled(MODEL + b'"input":[', b'"a",', b'"b"]}')


def send(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


async def test_no_request_holds_the_event_loop(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo:llm", "--model", "sim:blocks=4000,speedup=0"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--http-max-json-size", "64MiB") as front,
    ):
        await front.serves("echo-llm", "sim")
        held = await asyncio.to_thread(attack, front)
    assert {name: seconds for name, seconds in held.items() if seconds > MAX_HELD_S} == {}


async def test_no_output_holds_the_event_loop(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    """A caller can have a model repeat what is hard to parse."""
    nodes = [
        worker(etcd_server, nats_server, namespace, "--model", "echo:llm", "--model-name", parser, "--tool-call-parser", parser)
        for parser in ("mistral", "pythonic")
    ]
    async with nodes[0], nodes[1], frontend(etcd_server.endpoint, nats_server.url, namespace) as front:
        await front.serves("mistral", "pythonic")
        held = await asyncio.to_thread(attack_with_outputs, front)
    assert {name: seconds for name, seconds in held.items() if seconds > MAX_HELD_S} == {}


def outputs() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of an attack, and the fields of a request that has a model repeat its prompt."""
    for stream in (False, True):
        how = ", streamed" if stream else ""
        yield f"calls that are not closed{how}", {"model": "mistral", "text": "[TOOL_CALLS]{" * 800, "stream": stream}
        calls = "[" + "f()," * 1900 + "]"
        yield f"a list of calls in many choices{how}", {"model": "pythonic", "text": calls, "n": 16, "stream": stream}


def attack_with_outputs(front: FrontendProcess) -> dict[str, float]:
    """Return the CPU time for which each output held the event loop. Without bounds they took 0.14 to 0.9 s."""
    held = {}
    for name, fields in outputs():
        text = str(fields.pop("text"))
        body = {
            "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "nvext": {"use_raw_prompt": True},
            "temperature": 1,
            "max_tokens": len(text),
            **fields,
        }
        request = partial(send, front.http_port, "/v1/chat/completions", json.dumps(body).encode())
        held[name] = held_s(front, request, {200})
    return held


def attack(front: FrontendProcess) -> dict[str, float]:
    """Return the CPU time for which each of the attacks held the event loop. Without bounds they took 1 to 90 s."""
    return {name: held_s(front, partial(send, front.http_port, path, body), {200, 400, 413}) for name, path, body in attacks()}
