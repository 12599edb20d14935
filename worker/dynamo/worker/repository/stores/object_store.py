"""Object stores, read by fsspec: their URLs and credentials as Triton has them.

    s3://bucket/path    s3://host:port/bucket/path    s3://https://host:port/bucket/path    gs://bucket/path
    as://account/container/path

Credentials come from the environment, as each store's own tools take them, or from the file that TRITON_CLOUD_CREDENTIAL_PATH
names. Other URLs are fsspec's own. All functions block.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.errors import DynamoError, InvalidRequest, PayloadTooLarge, Unavailable
from dynamo.worker.paths import relative_path

log = logging.getLogger(__name__)

CREDENTIALS = "TRITON_CLOUD_CREDENTIAL_PATH"
MAX_FILES = 10_000
"""Files of one model, at most."""
_MAX_OBJECTS = 1_000_000
"""Objects of a whole repository, at most."""
_DOWNLOADS_AT_ONCE = 8
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "az": "azure"}
_VERSIONS = ("ETag", "etag", "md5Hash", "checksum", "generation", "LastModified", "last_modified", "mtime", "created")
"""What stores call the mark of an object's content; the first that a store has is used."""
_S3_HOST = re.compile(r"(?:(https?)://)?([A-Za-z0-9.\-]+):(\d+)/(.+)")
_S3_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}


def is_url(text: str) -> bool:
    return "://" in text


@dataclass(frozen=True, slots=True)
class StoredObject:
    size: int
    version: str
    """Changes when the object's content does."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is, in fsspec's terms."""

    url: str
    options: Mapping[str, Any]


def parse_url(url: str) -> StoreAddress:
    """Return the address that a URL of Triton names. Raises InvalidRequest if its credentials cannot be read."""
    scheme, _, rest = url.partition("://")
    rest = rest.rstrip("/")
    options: dict[str, Any] = {}
    if scheme == "s3":
        options["config_kwargs"] = dict(_S3_TIMEOUTS)
        if host := _S3_HOST.fullmatch(rest):
            options["endpoint_url"] = f"{host[1] or 'http'}://{host[2]}:{host[3]}"
            options["config_kwargs"]["s3"] = {"addressing_style": "path"}
            rest = host[4]
    elif scheme == "as":
        account, _, rest = rest.partition("/")
        options["account_name"] = os.environ.get("AZURE_STORAGE_ACCOUNT") or account.removesuffix(".blob.core.windows.net")
        if key := os.environ.get("AZURE_STORAGE_KEY"):
            options["account_key"] = key
        scheme = "abfs"
    if file := os.environ.get(CREDENTIALS):
        options |= _credentials(Path(file), url)
    return StoreAddress(f"{scheme}://{rest}", options)


def _credentials(file: Path, url: str) -> Mapping[str, Any]:
    """Return fsspec's options for what the file says of the longest prefix of `url`. Raises InvalidRequest."""
    scheme = url.partition("://")[0]
    try:
        by_prefix = json.loads(file.read_bytes()).get(scheme, {})
        prefixes = [prefix for prefix in by_prefix if url.startswith(prefix)]
        if not prefixes:
            raise InvalidRequest(f"{CREDENTIALS}: {file} has no credentials for {url}")
        return _to_options(scheme, by_prefix[max(prefixes, key=len)])
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{CREDENTIALS}: {file} cannot be read: {type(error).__name__}: {error}") from error


def _to_options(scheme: str, given: Any) -> Mapping[str, Any]:
    if scheme == "gs":
        return {"token": given}
    names = {"key_id": "key", "secret_key": "secret", "session_token": "token", "profile": "profile"}
    if scheme == "as":
        names = {"account_str": "account_name", "account_key": "account_key"}
    options: dict[str, Any] = {option: given[name] for name, option in names.items() if given.get(name)}
    if scheme == "s3" and given.get("region"):
        options["client_kwargs"] = {"region_name": given["region"]}
    return options


class ObjectStore:
    """The objects below one URL."""

    def __init__(self, url: str, address: StoreAddress, filesystem: Any, root: str) -> None:
        """See `open_store`."""
        self.url = url
        self._address = address
        self._filesystem = filesystem
        self._root = root.strip("/")

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url}>"

    @property
    def identity(self) -> str:
        """Text that is the same for the same store."""
        return f"{self._address.options.get('endpoint_url', '')} {self._address.options.get('account_name', '')} {self._root}"

    def list(self, below: str = "") -> dict[str, StoredObject]:
        """Return the objects by their paths below this URL, or below a folder in it. Raises InvalidRequest, Unavailable."""
        root = f"{self._root}/{below}" if below else self._root
        with _errors(self.url):
            try:
                found: Mapping[str, Mapping[str, Any]] = self._filesystem.find(root, detail=True)
            except FileNotFoundError:
                if below:
                    return {}
                raise
        if len(found) > _MAX_OBJECTS:
            raise PayloadTooLarge(f"{self.url} holds {len(found)} objects; at most {_MAX_OBJECTS} are allowed")
        objects = {}
        for name, about in found.items():
            if name.endswith("/") or about.get("type") == "directory":
                continue  # an empty object, which consoles make to show a folder
            inside = name.strip("/")
            if not inside.startswith(f"{root}/"):
                raise InvalidRequest(f"the store listed {name[:200]!r}, which is not below {self.url}")
            version = next((str(about[key]) for key in _VERSIONS if about.get(key) is not None), "")
            objects[inside[len(root) + 1 :]] = StoredObject(int(about.get("size") or 0), version)
        return objects

    def download(self, below: str, objects: Mapping[str, StoredObject], folder: Path) -> None:
        """Write objects below a folder of the store to `folder`. Raises InvalidRequest, Unavailable.

        None of them is written outside of it, and none by half without an error.
        """
        base = f"{self._root}/{below}" if below else self._root
        targets = {name: folder / relative_path(name) for name in objects}
        for target in targets.values():
            with _errors(self.url):
                target.parent.mkdir(parents=True, exist_ok=True)
        pool = ThreadPoolExecutor(_DOWNLOADS_AT_ONCE, "download")
        try:
            with _errors(self.url):
                list(pool.map(lambda name: self._filesystem.get_file(f"{base}/{name}", str(targets[name])), targets))
        finally:
            pool.shutdown(cancel_futures=True)
        for name, target in targets.items():
            if target.stat().st_size != objects[name].size:
                raise Unavailable(f"{self.url}: the object '{name[:200]}' was not read whole", retryable=False)

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raises InvalidRequest, Unavailable."""
        with _errors(self.url):
            content: bytes = self._filesystem.cat_file(f"{self._root}/{name}")
            return content


def check_model(url: str, objects: Mapping[str, StoredObject], max_bytes: int) -> None:
    """Raises InvalidRequest or PayloadTooLarge unless these can be the files of a model."""
    if not objects:
        raise InvalidRequest(f"there is nothing at {url}")
    if len(objects) > MAX_FILES:
        raise PayloadTooLarge(f"{url} holds {len(objects)} files; at most {MAX_FILES} are allowed")
    total = sum(each.size for each in objects.values())
    if total > max_bytes:
        raise PayloadTooLarge(f"{url} holds {total} bytes; --model-path-max-bytes allows {max_bytes}")
    for name in objects:
        relative_path(name)


def open_store(url: str) -> ObjectStore:
    """Raises InvalidRequest if a package or a file of credentials is missing, Unavailable if the store cannot be reached."""
    with _errors(url):
        import fsspec

        address = parse_url(url)
        uncached = {"skip_instance_cache": True, "use_listings_cache": False}
        filesystem, root = fsspec.core.url_to_fs(address.url, **uncached, **address.options)
    return ObjectStore(url, address, filesystem, root)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    try:
        yield
    except DynamoError:
        raise
    except ImportError as error:
        raise InvalidRequest(f"{url.partition('://')[0]}:// URLs need another package: install {_needed(url, error)}") from error
    except FileNotFoundError as error:
        raise InvalidRequest(f"there is nothing at {url}: {str(error)[:200]}") from error
    except Exception as error:  # each store's client has errors of its own
        log.warning("%s cannot be read", url, exc_info=error)
        raise Unavailable(f"{url} cannot be read: {type(error).__name__}: {str(error)[:200]}", retryable=False) from error


def _needed(url: str, error: ImportError) -> str:
    if error.name == "fsspec":
        return "dynamo-serving[store]"
    scheme = parse_url(url).url.partition("://")[0]
    return f"dynamo-serving[{_EXTRAS[scheme]}]" if scheme in _EXTRAS else f"the package {error.name}"
