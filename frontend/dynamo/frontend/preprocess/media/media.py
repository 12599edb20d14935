"""Media that requests name by http(s) URLs: fetched from hosts that the operator allows, and put into the request as data URLs.

A URL of a client must not reach what the client cannot reach. So a host must be on the list, all its addresses must be public,
the connection goes to the very address that was checked (a name that resolves to another one a moment later changes nothing), and
each redirect is checked like a first URL. Ports are those of the schemes.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from dynamo.common.errors import DynamoError, InvalidRequest, Overloaded, RateLimited
from dynamo.common.http.client import HttpClient, HttpResponse
from dynamo.common.http.served import media_type
from dynamo.frontend.config import MediaOptions
from dynamo.frontend.preprocess.checks import MODALITIES, url_field, url_of
from dynamo.frontend.preprocess.text import TextRequest

_MAX_URLS = 32
"""In one request."""
_AT_ONCE = 4
"""Fetched for one request."""
_REQUESTS_AT_ONCE = 64
"""Whose media are fetched. A key may have as many as are left for others: alone it has half of them."""
_RETRY_AFTER_S = 1.0
_LOOKUPS_AT_ONCE = 8
_MAX_REDIRECTS = 3
_MAX_URL_CHARS = 4096
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_KINDS = ("image/", "audio/", "video/")
_UNICAST = ip_network("2000::/3")
"""What IANA gives out of IPv6. The rest is reserved, or of a site, or stands for addresses of IPv4."""
_SPECIAL = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Addresses for protocols and documentation which `ipaddress` calls global."""
_BASE64_IN_THREAD_BYTES = 256 * 1024

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host. Raises OSError."""
Connect = Callable[[str, str, float], HttpClient]
"""Returns a client of an origin (scheme, host and port) at an address, with a time limit in seconds."""


def resolve(host: str, port: int) -> Sequence[str]:
    return [str(address[0]) for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Lookups:
    """Resolves hosts in threads of its own: name servers that do not respond must not hold those that metrics and others need."""

    def __init__(self, resolve: Callable[[str, int], Sequence[str]] = resolve) -> None:
        self._resolve = resolve
        self._threads = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, "media-lookup")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._resolve, host, port)


def connect(origin: str, address: str, timeout_s: float) -> HttpClient:
    return HttpClient(origin, timeout_s=timeout_s, address=address)


def is_public(address: str) -> bool:
    """Return whether an address is on the Internet, and none that stands for one which may not be."""
    try:
        ip = ip_address(address)
    except ValueError:  # such as an IPv6 address of one link
        return False
    if isinstance(ip, IPv6Address) and (ip not in _UNICAST or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


class MediaUrls:
    """Fetches the media of requests."""

    def __init__(self, options: MediaOptions, resolve: Resolve | None = None, connect: Connect = connect) -> None:
        self._options = options
        self._resolve = resolve or Lookups()
        self._connect = connect
        self._requests: Counter[str] = Counter()
        """By API key."""

    async def inlined(self, request: TextRequest, modalities: Sequence[str], key: str = "") -> TextRequest:
        """Return `request` with data URLs in the place of http(s) URLs of media that the model takes.

        `key` is the name of the caller's API key, if it has one. Raises InvalidRequest for a URL that may not be fetched or whose
        content is no medium, Overloaded if too many are fetched, and RateLimited if too many are this key's.
        """
        parts = request.media if self._options.hosts else ()
        urls = Counter(url for part in parts if (url := _http_url(part, modalities)) is not None)
        if not urls:
            return request
        if urls.total() > _MAX_URLS:
            raise InvalidRequest(f"got {urls.total()} media by URL; at most {_MAX_URLS} are allowed", param="messages")
        left = _REQUESTS_AT_ONCE - self._requests.total()
        if not left:
            raise Overloaded("too many requests have their media fetched now")
        if key and self._requests[key] >= left:
            message = (
                f"{self._requests[key]} requests of the API key '{key}' have their media fetched now; the rest is for others"
            )
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)
        self._requests[key] += 1
        try:
            async with asyncio.timeout(self._options.timeout_s):
                fetched = await _Fetch(self._options, self._resolve, self._connect).all(urls)
        except TimeoutError:
            raise InvalidRequest(f"the media did not arrive within {self._options.timeout_s:g} s", param="messages") from None
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]
        return msgspec.structs.replace(
            request,
            messages=[_with_fetched(message, fetched, modalities) for message in request.messages or ()],
            media=tuple(_part_with_fetched(part, fetched, modalities) for part in request.media),
        )


class _Fetch:
    """Fetches the media of one request."""

    def __init__(self, options: MediaOptions, resolve: Resolve, connect: Connect) -> None:
        self._options = options
        self._resolve = resolve
        self._connect = connect
        self._left = options.max_bytes
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def all(self, urls: Mapping[str, int]) -> dict[str, str]:
        """Return a data URL for each URL. Raises InvalidRequest for the first one that fails.

        `urls`: how often the request names each. It becomes as much longer as if each time were fetched.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                fetched = {url: tasks.create_task(self._one(url, times)) for url, times in urls.items()}
        except* DynamoError as errors:
            raise errors.exceptions[0] from None
        return {url: task.result() for url, task in fetched.items()}

    async def _one(self, url: str, times: int) -> str:
        async with self._turns:
            try:
                kind, data = await self._follow(url, times)
            except InvalidRequest:
                raise
            except DynamoError as error:  # it concerns a server of others: what it said is not for the client
                raise _refused(url, "cannot be fetched") from error
        if len(data) < _BASE64_IN_THREAD_BYTES:
            encoded = base64.b64encode(data)
        else:
            encoded = await asyncio.to_thread(base64.b64encode, data)
        return f"data:{kind};base64,{encoded.decode()}"

    async def _follow(self, first: str, times: int) -> tuple[str, bytes]:
        """Return the type and the content that a URL leads to."""
        url = first
        for _ in range(_MAX_REDIRECTS + 1):
            parts = self._checked(url)
            origin = f"{parts.scheme}://{parts.hostname}"
            client = self._connect(origin, await self._address(parts), self._options.timeout_s)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"accept": "image/*, audio/*, video/*", "accept-encoding": "identity"}
            try:
                async with client.send("GET", target, headers=headers) as response:
                    if response.status not in _REDIRECTS:
                        return await self._read(url, times, response)
                    location = urljoin(url, response.headers.get("location", ""))
            finally:
                client.close()
            if parts.scheme == "https" and not location.startswith("https:"):
                raise _refused(first, "is redirected from https to http")
            url = location
        raise _refused(first, f"is redirected more than {_MAX_REDIRECTS} times")

    async def _read(self, url: str, times: int, response: HttpResponse) -> tuple[str, bytes]:
        kind = media_type(response.headers.get("content-type", ""))
        if response.status != 200:
            raise _refused(url, f"has status {response.status}")
        if not kind.startswith(_KINDS) or not kind.replace("/", "").replace("-", "").replace("+", "").replace(".", "").isalnum():
            raise _refused(url, "is neither image nor audio nor video")
        data = bytearray()
        async with aclosing(response.chunks()) as chunks:
            async for chunk in chunks:
                self._left -= times * len(chunk)  # before it is kept: several are read at once
                if self._left < 0:
                    raise _refused(url, f"makes the media of the request longer than {self._options.max_bytes} bytes")
                data += chunk
        return kind, bytes(data)

    def _checked(self, url: str) -> SplitResult:
        """Return the parts of a URL that may be fetched. Raises InvalidRequest."""
        if len(url) > _MAX_URL_CHARS or not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
            raise _refused(url, "is too long, or has characters that must be percent-encoded")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refused(url, "is not a URL") from None
        host = parts.hostname or ""
        if parts.scheme not in _PORTS or port not in (None, _PORTS[parts.scheme]) or "@" in parts.netloc:
            raise _refused(url, "has a scheme, a port or a user that is not allowed")
        if not any(
            host == allowed or (allowed.startswith(".") and f".{host}".endswith(allowed)) for allowed in self._options.hosts
        ):
            raise _refused(url, "is not at a host that the operator allows (--media-url-host)")
        return parts

    async def _address(self, parts: SplitResult) -> str:
        """Return an address of the URL's host. Raises InvalidRequest unless all of them are public."""
        host = parts.hostname or ""
        try:
            addresses = await self._resolve(host, _PORTS[parts.scheme])
        except (OSError, UnicodeError):
            addresses = ()
        if not addresses or not all(map(is_public, addresses)):
            raise _refused(parts.geturl(), "is at a host without an address, or with one that is not public")
        return addresses[0]


def _refused(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{url[:200]!r} {why}", param="messages")


def _http_url(part: Mapping[str, Any], modalities: Sequence[str]) -> str | None:
    """Return the URL to fetch for a part; None if there is none, or the model does not take the part."""
    kind = part.get("type")
    if not isinstance(kind, str) or MODALITIES.get(kind) not in modalities:
        return None
    url = url_of(part)
    return url if url.lower().startswith(("http://", "https://")) else None


def media_length(media: Sequence[Mapping[str, Any]]) -> int:
    """Return the length of media: of their URLs, with the content of data URLs, or of the bytes that were decoded."""
    return sum(len(data if isinstance(data := part.get("data"), bytes) else url_of(part)) for part in media)


def _with_fetched(message: Mapping[str, Any], fetched: Mapping[str, str], modalities: Sequence[str]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [_part_with_fetched(part, fetched, modalities) if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts}


def _part_with_fetched(part: dict[str, Any], fetched: Mapping[str, str], modalities: Sequence[str]) -> dict[str, Any]:
    url = _http_url(part, modalities)
    if url is None or url not in fetched:
        return part
    field = url_field(part)
    assert field is not None
    value = part[field]
    return {**part, field: {**value, "url": fetched[url]} if isinstance(value, Mapping) else fetched[url]}
