"""Files of a model that a load request brings or names, and the checks that they stay inside their folder."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dynamo.common.errors import DynamoError, Forbidden, InvalidRequest, Unsupported
from dynamo.worker.paths import MAX_PATH_CHARS, relative_path
from dynamo.worker.repository.stores.object_store import check_model, is_url, open_store


@asynccontextmanager
async def temporary_folder() -> AsyncIterator[Path]:
    """Yield a folder for the files of one model. It is removed after the body."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="dynamo-model-"))
    try:
        yield folder
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


class FilesNotWritten(DynamoError):
    """The files of a load request cannot be written. An internal error, as in Triton, though most often their names are wrong."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"failed to load '{model}', failed to poll from model repository: its files cannot be written: {reason}")


async def write_files(model: str, files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files of a model to `folder`. Raises FilesNotWritten, and InvalidRequest for a path that leads out of it."""
    paths = {relative_path(name): data for name, data in files.items()}

    def write() -> None:
        for path, data in paths.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        raise FilesNotWritten(model, error.strerror or str(error)) from error


class ModelPaths:
    """Folders and object-store prefixes below which load requests may name models."""

    def __init__(self, roots: Sequence[str], max_bytes: int) -> None:
        """`roots`: folders, or URLs such as s3://bucket/models. Raises InvalidRequest for a folder that does not exist."""
        self.max_bytes = max_bytes
        """How large a model may be that is read from an object store."""
        plain = [_without_file_scheme(root) for root in roots]
        self._folders = [_existing(root) for root in plain if not is_url(root)]
        self._urls = [root.rstrip("/") for root in plain if is_url(root)]

    async def find(self, path: str) -> Path | str:
        """Return the folder, or the URL, that `path` names. Raises Forbidden, InvalidRequest."""
        if not self._folders and not self._urls:
            raise Unsupported("model_path is not allowed here: the worker has no --model-path-root")
        if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
            raise InvalidRequest("model_path is empty or too long")
        path = _without_file_scheme(path)
        return self._url(path) if is_url(path) else await asyncio.to_thread(self._folder, path)

    async def copy(self, url: str, folder: Path) -> None:
        """Copy all objects below `url` to `folder`. Raises InvalidRequest, PayloadTooLarge, Unavailable."""
        await asyncio.to_thread(_copy, url, folder, self.max_bytes)

    def _folder(self, text: str) -> Path:
        path = Path(text).resolve()  # follows links: where it really is counts
        if not any(path.is_relative_to(root) and path != root for root in self._folders):
            raise Forbidden(f"model_path {text[:200]!r} is not below a --model-path-root")
        if not path.is_dir():
            raise InvalidRequest(f"model_path {text[:200]!r} is not a folder")
        return path

    def _url(self, url: str) -> str:
        url = url.rstrip("/")
        rest = url.partition("://")[2]
        parts = rest.removeprefix("http://").removeprefix("https://").split("/")  # of a store that is not Amazon's
        if any(part in ("", ".", "..") for part in parts) or any(c < " " or c in "*?[]{}#%\\" for c in url):
            raise InvalidRequest(f"model_path {url[:200]!r} has parts that are not allowed")
        if "::" in url:
            raise InvalidRequest("model_path must not chain one store to another")
        if not any(url.startswith(f"{root}/") for root in self._urls):
            raise Forbidden(f"model_path {url[:200]!r} is not below a --model-path-root")
        return url


def _without_file_scheme(text: str) -> str:
    """Remove `file://`, so that folders are checked as such however they are written."""
    return text.removeprefix("file://") if text.startswith("file:///") else text


def _existing(root: str) -> Path:
    path = Path(root).expanduser().resolve()
    if not path.is_dir():
        raise InvalidRequest(f"--model-path-root {root} is not a folder")
    return path


def _copy(url: str, folder: Path, max_bytes: int) -> None:
    store = open_store(url)
    objects = store.list()
    check_model(url, objects, max_bytes)
    store.download("", objects, folder)
