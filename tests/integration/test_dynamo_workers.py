"""Workers written for NVIDIA Dynamo, as scripts that know nothing of this project, in our fleet."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
from openai import AsyncOpenAI

from dynamo.worker.engine.echo import CHAT_TEMPLATE, byte_tokenizer
from tests.support.processes import Process, frontend, script
from tests.support.servers import EtcdServer, NatsServer

SAMPLES = Path(__file__).parent / "clients/dynamo_workers"


async def test_workers_of_nvidia_dynamo_are_served_unchanged(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    where = {
        "DYN_NAMESPACE": namespace,
        "DYN_ETCD_ENDPOINTS": etcd_server.endpoint,
        "DYN_NATS_SERVERS": nats_server.url,
    }
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        workers: list[Process] = []
        for name, *arguments in (("text_worker",), ("token_worker", str(tmp_path)), ("tensor_worker",)):
            workers.append(await enter(script(f"{SAMPLES}/{name}.py", *arguments, runner="dynamo.worker.compat", **where)))
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace))
        await front.serves("texts", "tokens", "tensors")
        url = f"http://127.0.0.1:{front.http_port}"
        client = await enter(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        http = await enter(httpx2.AsyncClient(base_url=url))

        chat = await client.chat.completions.create(model="texts", messages=[{"role": "user", "content": "hi"}])
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("you said hi ", "stop")
        stream = await client.completions.create(model="texts", prompt="a b", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "you said a b "

        tokens = await client.completions.create(model="tokens", prompt="repeat me", max_tokens=6)
        assert (tokens.choices[0].text, tokens.choices[0].finish_reason) == ("repeat", "length")
        assert tokens.usage is not None and (tokens.usage.prompt_tokens, tokens.usage.completion_tokens) == (9, 6)

        inputs = [
            {"name": "numbers", "datatype": "INT32", "shape": [2], "data": [3, 4]},
            {"name": "words", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        ]
        response = (await http.post("/v2/models/tensors/infer", json={"inputs": inputs})).json()
        outputs: dict[str, Any] = {output["name"]: output["data"] for output in response["outputs"]}
        assert outputs == {"numbers": [6, 8], "words": ["a"]}
        for process in workers:
            process.terminate()
            assert await process.ended() == 0
