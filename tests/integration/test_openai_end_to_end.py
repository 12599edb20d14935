"""An OpenAI request end to end: openai's client → HTTP → frontend → NATS → worker and back."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError

from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]


def client(front: FrontendProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{front.http_port}/v1", api_key="none", max_retries=0)


async def test_the_models_output_is_the_same_on_every_path(deployment: FrontendProcess) -> None:
    async with client(deployment) as ours:
        rendered = "user: What is the capital of France?\nassistant: "
        chat = await ours.chat.completions.create(model="echo-llm", messages=USER, max_tokens=len(rendered))
        assert chat.choices[0].message.content == rendered
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == chat.usage.completion_tokens == len(rendered)

        text = "Zürich 🦙 — " * 3
        stream = await ours.completions.create(model="echo-llm", prompt=text, max_tokens=len(text.encode()), stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert "".join(pieces) == text
        assert len(pieces) > len(text) / 2

        batch = await ours.completions.create(model="echo-llm", prompt=["ab", "cd"], max_tokens=4, n=2, temperature=1)
        assert [choice.text for choice in batch.choices] == ["abab", "abab", "cdcd", "cdcd"]

        stopped = await ours.completions.create(model="echo-llm", prompt="one two ", max_tokens=100, stop=[" one"])
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two", "stop")

        response = await ours.responses.create(model="echo-llm", input="Hi", max_output_tokens=len("user: Hi\nassistant: "))
        assert (response.output_text, response.status) == ("user: Hi\nassistant: ", "incomplete")
        async with AsyncAnthropic(base_url=f"http://127.0.0.1:{deployment.http_port}", api_key="none") as theirs:
            message = await theirs.messages.create(model="echo-llm", max_tokens=8, messages=[{"role": "user", "content": "Hi"}])
        assert (message.content[0].text, message.stop_reason) == ("user: Hi", "max_tokens")  # type: ignore[union-attr]

        vectors = await ours.embeddings.create(model="embedder", input=["the cat sat", "the cat sits", "quarterly results"])
        cat, cats, money = (np.array(item.embedding) for item in vectors.data)
        assert cat @ cats > 0.5 > cat @ money
        assert vectors.usage.prompt_tokens == 11 + 12 + 17


async def test_a_model_that_takes_text_is_served_over_every_protocol(deployment: FrontendProcess) -> None:
    url = f"http://127.0.0.1:{deployment.http_port}"
    async with client(deployment) as ours, httpx2.AsyncClient(base_url=url, timeout=120) as http:
        capitals = "WHAT IS THE CAPITAL OF FRANCE?"
        chat = await ours.chat.completions.create(model="shout", messages=USER)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (capitals, "stop")
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (6, 6)
        stream = await ours.completions.create(model="shout", prompt="one two three", max_tokens=2, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert ["".join(chunk.text for chunk in chunks), chunks[-1].finish_reason] == ["ONE TWO", "length"]
        stopped = await ours.completions.create(model="shout", prompt="one two three", stop="TWO")
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("ONE ", "stop")
        assert (await ours.responses.create(model="shout", input="Hi")).output_text == "HI"
        async with AsyncAnthropic(base_url=url, api_key="none") as theirs:
            message = await theirs.messages.create(model="shout", max_tokens=8, messages=[{"role": "user", "content": "Hi"}])
        assert message.content[0].text == "HI"  # type: ignore[union-attr]
        inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["read me"]}]
        kserve = (await http.post("/v2/models/shout/infer", json={"inputs": inputs})).json()
        assert kserve["outputs"][0]["data"] == ["READ ME"]

        tool: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
        asking: Any = [{"role": "user", "content": "use clock"}]
        called = await ours.chat.completions.create(model="shout", messages=asking, tools=[tool])
        assert [call.function.name for call in called.choices[0].message.tool_calls or []] == ["clock"]  # type: ignore[union-attr]
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        seen: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}]
        assert (await ours.chat.completions.create(model="shout", messages=seen)).choices[0].message.content == "SEE"
        with pytest.raises(BadRequestError, match="does not support 'logprobs'"):
            await ours.chat.completions.create(model="shout", messages=USER, logprobs=True)


async def test_a_real_embedding_model_measures_similarity_in_every_encoding(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    model = ("--model", f"{EXAMPLES}/embeddings.py:MiniLm")
    async with (
        worker(etcd_server, nats_server, namespace, *model),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        client(front) as ours,
    ):
        await front.serves("minilm")
        texts = ["A man is eating food.", "He is having a meal, which takes a while.", "The stock market fell sharply."]
        embeddings = await ours.embeddings.create(model="minilm", input=texts, encoding_format="float")
        eating, meal, market = (np.array(item.embedding) for item in embeddings.data)
        assert [len(eating), round(float(eating @ eating), 5)] == [384, 1]
        assert eating[:2] == pytest.approx([0.0332, 0.0044], abs=1e-3)  # as the model's authors' library has it
        assert eating @ meal > 0.5 > 0.2 > eating @ market
        packed = await ours.embeddings.create(model="minilm", input=texts[2], dimensions=64)  # base64 on the wire
        short = np.array(packed.data[0].embedding)
        assert short == pytest.approx(market[:64] / np.linalg.norm(market[:64]), abs=1e-5)
        assert packed.usage.prompt_tokens == 8
        by_ids = await ours.embeddings.create(model="minilm", input=[[101, 1996, 102], [101, 7592, 2088, 102]])
        assert (len(by_ids.data), by_ids.usage.prompt_tokens) == (2, 7)
        documents = ["Stocks lost five percent.", "He is having lunch.", "A dog runs."]
        ranked: Any = await ours.post("/rerank", body={"query": texts[0], "documents": documents, "top_n": 2}, cast_to=object)
        assert [result["index"] for result in ranked["results"]] == [1, 2]
        assert ranked["results"][0]["document"] == {"text": documents[1]}
        scored: Any = await ours.post("/score", body={"text_1": texts[0], "text_2": texts[1:]}, cast_to=object)
        assert [item["score"] for item in scored["data"]] == pytest.approx([eating @ meal, eating @ market], abs=1e-5)
        with pytest.raises(BadRequestError, match="dimensions"):
            await ours.embeddings.create(model="minilm", input="a", dimensions=1000)


async def test_a_client_that_disconnects_frees_the_worker(deployment: FrontendProcess) -> None:
    body = {"model": "echo-llm", "prompt": "abc", "max_tokens": 100_000, "stream": True}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{deployment.http_port}", verify=False, timeout=120) as http:
        before = _cancelled((await http.get("/metrics")).text)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_raw():
                break
        async with asyncio.timeout(120):
            while True:
                metrics = (await http.get("/metrics")).text
                if 'dynamo_frontend_inflight_requests{model="echo-llm"} 0.0' in metrics:
                    break
                await asyncio.sleep(0.05)
        assert _cancelled(metrics) == before + 1


def _cancelled(metrics: str) -> float:
    labels = 'endpoint="completions",model="echo-llm",request_type="stream"'
    found = re.search(rf"^dynamo_frontend_model_cancellation_total\{{{labels}\}} (.+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.real_model
async def test_a_real_model_responds(small_model: FrontendProcess) -> None:
    async with client(small_model) as ours:
        greedy: Any = {"model": "smollm2", "messages": USER, "temperature": 0, "max_tokens": 16}
        completion = await ours.chat.completions.create(**greedy)
        stream = await ours.chat.completions.create(**greedy, stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert completion.choices[0].message.content == streamed
        completion = await ours.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=1, temperature=0
        )
        assert completion.choices[0].text == " Paris"
        # The conversation as the library of the model's authors has it in tokens.
        system, question = "You are a helpful AI assistant named SmolLM, trained by Hugging Face", USER[0]["content"]
        tokens: Any = await ours.post("/tokenize", body={"model": "smollm2", "messages": USER}, cast_to=object)
        assert tokens["tokens"] == [
            *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
            *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
        ]
        text: Any = await ours.post("/detokenize", body={"model": "smollm2", "tokens": tokens["tokens"]}, cast_to=object)
        turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert text["prompt"] == turns

        person = {
            "type": "object",
            "properties": {"age": {"type": "integer"}},
            "required": ["age"],
            "additionalProperties": False,
        }
        structured = await ours.chat.completions.create(
            model="smollm2",
            messages=USER,
            temperature=0,  # drawn at random, a number may go on to the end of the context
            max_tokens=64,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": person, "strict": True}},
        )
        assert list(json.loads(structured.choices[0].message.content or "")) == ["age"]
        chosen = await ours.chat.completions.create(**greedy, extra_body={"guided_choice": ["red", "blue"]})
        assert chosen.choices[0].message.content in ("red", "blue")
        counting: Any = {"model": "smollm2", "prompt": "Count: 1, 2, 3,", "temperature": 0, "max_tokens": 40}
        stopped = await ours.completions.create(**counting, stop="6, 7")  # four tokens
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" 4, 5, ", "stop")
        least = await ours.chat.completions.create(**{**greedy, "max_tokens": 40}, extra_body={"min_tokens": 40})
        assert least.usage is not None
        assert least.usage.completion_tokens == 40

        scored = await ours.chat.completions.create(**greedy, logprobs=True, top_logprobs=2)
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(token.token for token in logprobs.content) == streamed
        assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
