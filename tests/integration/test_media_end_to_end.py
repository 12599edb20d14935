"""Audio, images and videos pass through the fleet to servers that have them, with the client of OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx2
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError

from tests.support.media_server import SPOKEN, MediaServer
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S

AUDIO = ("speech.wav", bytes(range(256)) * 8192, "audio/wav")
"""2 MiB: more than one message of the bus, and than what is read on the event loop."""


@dataclass
class Fleet:
    front: FrontendProcess
    servers: list[MediaServer]
    client: AsyncOpenAI


@asynccontextmanager
async def fleet(etcd: EtcdServer, nats: NatsServer, namespace: str, *options: str, servers: int = 1) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        running = [await enter(MediaServer().serving()) for _ in range(servers)]
        urls = [option for server in running for option in ("--url", server.url)]
        await enter(worker(etcd, nats, namespace, *urls, "--remote-kind", "relay", "--model-name", "whisper"))
        await enter(worker(etcd, nats, namespace, "--model", "echo:llm"))
        front = await enter(frontend(etcd.endpoint, nats.url, namespace, *options))
        await front.serves("whisper", "echo-llm")
        client = await enter(AsyncOpenAI(base_url=f"http://127.0.0.1:{front.http_port}/v1", api_key="none", max_retries=0))
        yield Fleet(front, running, client)


async def test_audio_images_and_spoken_chats_pass_through_with_the_name_that_the_server_knows(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace) as running:
        openai, [server] = running.client, running.servers
        text = await openai.audio.transcriptions.create(model="whisper", file=AUDIO, language="en")
        assert text.text == f"{len(AUDIO[1])} bytes"
        fields = server.requests[-1].fields
        assert (fields["model"], fields["language"], fields["file"] == AUDIO[1]) == (b"/models/whisper-tiny", b"en", True)
        srt = await openai.audio.transcriptions.create(model="whisper", file=AUDIO, response_format="srt")
        assert srt.startswith("1\n00:00:00,000 -->")
        with pytest.deprecated_call():  # by OpenAI's client
            verbose = await openai.audio.translations.create(model="whisper", file=AUDIO, response_format="verbose_json")
        assert verbose.duration == 1.0 and server.requests[-1].path == "/v1/audio/translations"
        stream = await openai.audio.transcriptions.create(model="whisper", file=AUDIO, stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]

        async with openai.audio.speech.with_streaming_response.create(model="whisper", voice="alloy", input="Hi") as speech:
            assert (speech.headers["content-type"], await speech.read() == SPOKEN) == ("audio/mpeg", True)
        images = await openai.images.generate(model="whisper", prompt="a cat")
        assert images.data is not None and images.data[0].b64_json == "AAAA"
        edited = await openai.images.edit(model="whisper", image=("a.png", b"png", "image/png"), prompt="a hat")
        assert edited.data is not None and server.requests[-1].fields["image"] == b"png"

        video = await openai.post("/videos", body={"model": "whisper", "prompt": "a cat"}, cast_to=dict[str, object])
        assert video["status"] == "completed"
        form = {"model": (None, "whisper"), "prompt": (None, "a cat"), "image": ("a.png", b"png", "image/png")}
        async with httpx2.AsyncClient(base_url=f"{openai.base_url}", timeout=WAIT_S) as http:
            clip = await http.post("videos/sync", files=form)
        assert (clip.headers["content-type"], clip.content) == ("video/mp4", SPOKEN)

        chat = await openai.chat.completions.create(
            model="whisper",
            messages=[{"role": "user", "content": "Hi"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "wav"},
        )
        assert chat.choices[0].message.audio is not None and chat.choices[0].message.audio.transcript == "Hi"
        assert b'"model":"/models/whisper-tiny"' in server.requests[-1].body
        other = await openai.chat.completions.create(model="echo-llm", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
        assert other.choices[0].message.content is not None and len(server.requests) == 10


async def test_what_a_server_refuses_is_its_own_answer_and_one_that_is_busy_leaves_it_to_another(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace, servers=2) as running:
        openai = running.client
        for server in running.servers:
            server.refusals = [(422, b'{"error":{"message":"no such language","type":"invalid"}}')]
        with pytest.raises(APIStatusError, match="no such language") as refused:
            await openai.audio.transcriptions.create(model="whisper", file=AUDIO, language="xx")
        assert refused.value.status_code == 422 and sum(len(server.requests) for server in running.servers) == 1
        for server in running.servers:
            server.refusals = []
        running.servers[0].refusals = [(503, b"busy")] * 4
        for _ in range(4):
            assert (await openai.audio.transcriptions.create(model="whisper", file=AUDIO)).text

        with pytest.raises(BadRequestError, match=r"model 'echo-llm' has no /v1/audio/transcriptions"):
            await openai.audio.transcriptions.create(model="echo-llm", file=AUDIO)
        with pytest.raises(BadRequestError, match=r"multipart/form-data"):
            await openai.post("/audio/transcriptions", body={"model": "whisper"}, cast_to=object)


async def test_a_caller_that_leaves_ends_the_request_at_the_server_and_a_server_that_is_lost_ends_the_stream_with_a_word(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace) as running:
        openai, [server] = running.client, running.servers
        server.is_slow = True
        async with openai.audio.speech.with_streaming_response.create(model="whisper", voice="alloy", input="Hi") as speech:
            assert await anext(speech.iter_bytes())
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()

        server.is_slow, server.is_cut = False, True
        url = f"http://127.0.0.1:{running.front.http_port}"
        async with httpx2.AsyncClient(base_url=url) as http:
            form = {"model": "whisper", "stream": "true"}
            stream = await http.post("/v1/audio/transcriptions", data=form, files={"file": AUDIO})
            assert stream.status_code == 200 and '"error"' in stream.text.strip().rpartition("\n\n")[2]
            with pytest.raises(httpx2.RemoteProtocolError):
                await http.post("/v1/audio/speech", json={"model": "whisper", "input": "Hi", "voice": "alloy"})
