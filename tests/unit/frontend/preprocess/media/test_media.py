"""Media by URL: what is fetched, and what a client's URL never reaches."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import InvalidRequest, RateLimited
from dynamo.common.generation import unpack_text
from dynamo.common.http.client import HttpClient
from dynamo.common.model_card import TAKES_TEXT, LlmInfo, ModelCard, ModelKind
from dynamo.frontend.config import FrontendConfig, MediaOptions, TextLimits
from dynamo.frontend.preprocess.media.media import Lookups, MediaUrls, is_public, media_length
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.plain import PlainTextModel
from dynamo.frontend.preprocess.text import TextRequest

PUBLIC = "93.184.216.34"
IMAGE = b"not really a picture"
CARD = ModelCard(name="seer", kind=ModelKind.LLM, llm=LlmInfo(context_length=1000, tokenizer=TAKES_TEXT, modalities=("image",)))


@dataclass
class Site:
    """An HTTP server that stands for all hosts."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    """Whole responses, by path."""
    addresses: dict[str, Sequence[str]] = field(default_factory=dict)
    resolved: list[str] = field(default_factory=list)
    connected: list[tuple[str, str]] = field(default_factory=list)
    """Origin and address of each connection."""
    heads: list[bytes] = field(default_factory=list)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        return self.addresses.get(host, (PUBLIC,))

    def connect(self, origin: str, address: str, timeout_s: float) -> HttpClient:
        self.connected.append((origin, address))
        return HttpClient(f"http://{origin.partition('://')[2]}:{self.port}", timeout_s=timeout_s, address="127.0.0.1")

    def media(self, **options: object) -> MediaUrls:
        settings = {"hosts": ("images.example.com", ".cdn.example.com"), **options}
        return MediaUrls(MediaOptions(**settings), self.resolve, self.connect)  # type: ignore[arg-type]


def page(body: bytes = IMAGE, kind: str = "image/png", status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body


@asynccontextmanager
async def serving() -> AsyncIterator[Site]:
    site = Site()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        site.heads.append(head)
        if (response := site.pages.get(head.split(b" ")[1].decode())) is not None:  # others are silent
            writer.write(response)
            writer.close()
        else:
            await reader.read()
            writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    site.port = server.sockets[0].getsockname()[1]
    try:
        yield site
    finally:
        server.close()


def request(*urls: str) -> TextRequest:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    content = [{"type": "text", "text": "What is it?"}, *parts]
    return TextRequest(model="seer", messages=[{"role": "user", "content": content}], media=tuple(parts))


async def urls_of(media: MediaUrls, *urls: str) -> list[str]:
    """The URLs that the engine gets."""
    model = PlainTextModel(CARD, TextLimits(), Offload(), media)
    generate = await model.to_generate(request(*urls))
    assert all(part["image_url"]["detail"] == "low" for part in generate.media)
    return [part["image_url"]["url"] for part in generate.media]


def data_url(data: bytes = IMAGE) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def test_an_image_at_an_allowed_host_reaches_the_engine_as_data() -> None:
    async with serving() as site:
        site.pages = {"/cat.png?size=1": page(), "/": page(b"another")}
        fetched = await urls_of(
            site.media(), "https://images.example.com/cat.png?size=1", "http://eu.cdn.example.com", data_url(b"own")
        )
        assert fetched == [data_url(), data_url(b"another"), data_url(b"own")]
        assert sorted(site.connected) == [("http://eu.cdn.example.com", PUBLIC), ("https://images.example.com", PUBLIC)]
        assert sorted(site.resolved) == ["eu.cdn.example.com", "images.example.com"]
        assert any(b"host: images.example.com" in head.lower() for head in site.heads)


async def test_routers_see_the_content_and_not_the_url() -> None:
    async with serving() as site:
        site.pages = {"/a": page(), "/b": page(), "/c": page(b"another")}
        model = PlainTextModel(CARD, TextLimits(), Offload(), site.media())
        prompts = [(await model.to_generate(request(f"http://images.example.com/{name}"))).prompt for name in "abc"]
        by_data = (await model.to_generate(request(data_url()))).prompt
    assert prompts[0] == prompts[1] == by_data != prompts[2]
    assert "sha256" in json.dumps(unpack_text(prompts[0]).messages)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://elsewhere.org/a", "not at a host that the operator allows"),
        ("http://cdn.example.com.elsewhere.org/a", "not at a host"),
        ("http://notcdn.example.com/a", "not at a host"),
        ("http://images.example.com@127.0.0.1/a", "a user that is not allowed"),
        ("http://images.example.com:8080/a", "a port"),
        ("http://images.example.com:443/a", "a port"),
        ("http://images.example.com:x/a", "is not a URL"),
        ("http://images.example.com/a b", "percent-encoded"),
        ("http://images.example.com/a\r\nx: y", "percent-encoded"),
        ("http://images.example.com/" + "a" * 5000, "too long"),
        ("http://127.0.0.1/a", "not at a host"),
        ("http://[::1]/a", "not at a host"),
        ("file:///etc/passwd", "must be data URLs"),
        ("http://images.example.com/page", "neither image nor audio nor video"),
        ("http://images.example.com/none", "has status 404"),
        ("http://images.example.com/long", "longer than 1000 bytes"),
        ("http://images.example.com/garbage", "cannot be fetched"),
        ("http://images.example.com/silent", "did not arrive within"),
        ("http://images.example.com/loop", "more than 3 times"),
        ("http://images.example.com/away", "not at a host"),
        ("https://images.example.com/down", "from https to http"),
        ("http://images.example.com/to-inside", "not public"),
        ("http://inside.cdn.example.com/a", "not public"),
        ("http://both.cdn.example.com/a", "not public"),
        ("http://lost.cdn.example.com/a", "without an address"),
    ],
)
async def test_a_url_that_may_not_be_fetched_or_is_no_image_is_refused(url: str, words: str) -> None:
    async with serving() as site:
        site.addresses = {
            "inside.cdn.example.com": ["10.0.0.1"],
            "both.cdn.example.com": [PUBLIC, "169.254.169.254"],
            "lost.cdn.example.com": [],
        }
        site.pages = {
            "/page": page(kind="text/html"),
            "/none": page(status=404),
            "/long": page(b"x" * 2000),
            "/garbage": b"220 mail.example.com ESMTP\r\n\r\n",
            "/loop": page(status=302, location="/loop"),
            "/away": page(status=307, location="http://elsewhere.org/a"),
            "/down": page(status=301, location="http://images.example.com/a"),
            "/to-inside": page(status=301, location="//inside.cdn.example.com/a"),
        }
        with pytest.raises(InvalidRequest) as refused:
            await urls_of(site.media(max_bytes=1000, timeout_s=0.5 if "silent" in url else 20), url)
        assert words in str(refused.value)
        assert all(address == PUBLIC for _, address in site.connected)


async def test_all_media_of_a_request_share_the_bound() -> None:
    async with serving() as site:
        site.pages = {f"/{number}": page(b"x" * 400) for number in range(3)}
        urls = [f"http://images.example.com/{number}" for number in range(3)]
        assert len(await urls_of(site.media(max_bytes=1200), *urls)) == 3
        with pytest.raises(InvalidRequest, match="longer than 1000 bytes"):
            await urls_of(site.media(max_bytes=1000), *urls)
        with pytest.raises(InvalidRequest, match="at most 32"):
            await urls_of(site.media(), *(f"http://images.example.com/{number}" for number in range(33)))


async def test_a_url_that_is_named_again_is_fetched_once_and_counts_again() -> None:
    async with serving() as site:
        site.pages = {"/a": page(b"x" * 400)}
        url = "http://images.example.com/a"
        assert await urls_of(site.media(max_bytes=800), url, url) == [data_url(b"x" * 400)] * 2
        assert len(site.connected) == 1
        with pytest.raises(InvalidRequest, match="longer than 1000 bytes"):
            await urls_of(site.media(max_bytes=1000), url, url, url)
        with pytest.raises(InvalidRequest, match="at most 32"):
            await urls_of(site.media(), *[url] * 33)


async def test_text_that_is_the_url_of_an_image_stays_text() -> None:
    async with serving() as site:
        site.pages = {"/a": page()}
        url = "http://images.example.com/a"
        image, text = {"type": "image_url", "image_url": url}, {"type": "text", "text": url}
        named = TextRequest(model="seer", messages=[{"role": "user", "content": [text, image]}], media=(image,))
        inlined = await site.media().inlined(named, ("image",))
        assert inlined.messages == [{"role": "user", "content": [text, {"type": "image_url", "image_url": data_url()}]}]


@pytest.mark.parametrize(
    ("kind", "field"), [("image_url", "image_url"), ("input_image", "image_url"), ("image", "image"), ("image", "url")]
)
async def test_the_url_of_an_image_may_be_written_as_other_servers_have_it(kind: str, field: str) -> None:
    async with serving() as site:
        site.pages = {"/a": page()}
        part = {"type": kind, field: "http://images.example.com/a"}
        inlined = await site.media().inlined(TextRequest(model="seer", messages=(), media=(part,)), ("image",))
    assert inlined.media == ({"type": kind, field: data_url()},)
    assert media_length(inlined.media) == len(data_url())


async def test_name_servers_that_do_not_respond_hold_no_threads_of_others() -> None:
    responds = threading.Event()

    def resolve(host: str, port: int) -> Sequence[str]:
        responds.wait()
        return [host]

    lookups = Lookups(resolve)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        try:
            waiting = [tasks.create_task(lookups(PUBLIC, 80)) for _ in range(100)]
            assert await asyncio.to_thread(lambda: "done") == "done"
        finally:
            responds.set()
    assert {task.result()[0] for task in waiting} == {PUBLIC}


async def test_a_key_leaves_half_of_what_is_free_to_others() -> None:
    """A silent server holds the requests of a key until they time out."""
    async with serving() as site:
        media, held = site.media(), []

        async def fetch(key: str) -> str:
            try:
                await media.inlined(request("http://images.example.com/silent"), ("image",), key)
            except RateLimited as error:
                return str(error)
            raise AssertionError("the server is silent")

        async def admitted(key: str) -> int:
            """Return how many requests of a key are fetched at most, beside those that are fetched already."""
            tasks = [asyncio.create_task(fetch(key)) for _ in range(70)]
            held.extend(tasks)
            await asyncio.sleep(0)
            return sum(not task.done() for task in tasks)

        assert [await admitted(key) for key in ("greedy", "greedy", "second", "third")] == [32, 0, 16, 8]
        refused = next(task for task in held if task.done())
        assert "requests of the API key 'greedy' have their media fetched now" in refused.result()
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        assert await admitted("greedy") == 32
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_without_allowed_hosts_nothing_is_fetched() -> None:
    async with serving() as site:
        with pytest.raises(InvalidRequest, match="must be data URLs"):
            await urls_of(site.media(hosts=()), "http://images.example.com/a")
        assert not site.resolved


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (PUBLIC, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        *dict.fromkeys(
            (
                *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
                *("255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
                *("::ffff:93.184.216.34", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:1::1", "not an address"),
                *("::7f00:1", "::ffff:0:a00:1", "64:ff9b:1::a00:1", "fec0::1", "4000::1", "3fff::1", "192.0.0.8", "192.88.99.1"),
            ),
            False,
        ).items(),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize("host", ["https://example.com", "example.com:80", "*.example.com"])
def test_a_host_is_given_without_scheme_and_port(host: str) -> None:
    with pytest.raises(ConfigError, match="media-url-host"):
        load(FrontendConfig, ["--media-url-host", host], {}, program="dynamo-frontend")
