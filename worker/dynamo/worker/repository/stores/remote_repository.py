"""A model repository in an object store.

What is needed to know of all models, their names, versions and configurations, lies in an *index folder* on this disk; it
has the layout of a repository, and a file in each model's folder whose name changes with any of the model's objects. A model
that is loaded gets a copy of its objects, whole and of one state. All methods block.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from dynamo.common.errors import DynamoError, InvalidRequest, Unavailable
from dynamo.common.names import check_name
from dynamo.worker.repository.declared.model_config import CONFIG_FILE
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stores.object_store import ObjectStore, StoredObject, check_model, open_store

log = logging.getLogger(__name__)

Objects: TypeAlias = Mapping[str, StoredObject]

_ATTEMPTS = 3
_MAX_CONFIG_BYTES = 4 * 2**20
_MAX_DIGITS = 20
"""A version has fewer digits than this."""
_MARK = ".objects-"


class _Changed(Exception):
    """The objects of a model changed while they were copied."""


class RemoteRepository:
    def __init__(self, url: str, copies: ContentCache, max_bytes: int) -> None:
        """`max_bytes`: of one model."""
        self._temporary = tempfile.TemporaryDirectory(prefix="dynamo-repository-", ignore_cleanup_errors=True)
        self.index_folder = Path(self._temporary.name)
        self._url = url.rstrip("/")
        self._copies = copies
        self._max_bytes = max_bytes
        self._store: ObjectStore | None = None
        self._is_listed = False
        self._refreshing = threading.Lock()

    def __repr__(self) -> str:
        return f"<RemoteRepository {self._url}>"

    def close(self) -> None:
        self._temporary.cleanup()

    def refresh(self) -> None:
        """Bring the index folder up to date. Raises InvalidRequest, Unavailable; the folder stays as it was then."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        models: dict[str, dict[str, StoredObject]] = {}
        objects = self._opened().list()
        if not objects and not self._is_listed:  # most likely a slip; later it means that all models were removed
            raise InvalidRequest(f"there is nothing at {self._url}")
        self._is_listed = True
        for name, each in objects.items():
            model, _, inside = name.partition("/")
            if inside and _is_model(model):
                models.setdefault(model, {})[inside] = each
        present = {entry.name for entry in self.index_folder.iterdir()}
        for model, files in models.items():
            try:
                self._write_model(model, files)
            except DynamoError as error:
                log.error("model '%s': its %s cannot be read: %s", model, CONFIG_FILE, error)  # again with the next refresh
        for model in present - models.keys():
            shutil.rmtree(self.index_folder / model)

    def _write_model(self, model: str, objects: Objects) -> None:
        """Write a model into the index folder, in place: it must not be missing at any moment."""
        folder = self.index_folder / model
        mark = folder / f"{_MARK}{_digest('', objects)}"
        if mark.exists():
            return
        folder.mkdir(exist_ok=True)
        self._write_config(model, objects)
        versions = {name.partition("/")[0] for name in objects if "/" in name}
        versions = {name for name in versions if name.isascii() and name.isdigit() and len(name) < _MAX_DIGITS}
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name not in versions:
                entry.rmdir()
            elif entry.name.startswith(_MARK):
                entry.unlink()
        for version in versions:
            (folder / version).mkdir(exist_ok=True)
        mark.touch()

    def _write_config(self, model: str, objects: Objects) -> None:
        config = self.index_folder / model / CONFIG_FILE
        if CONFIG_FILE not in objects or objects[CONFIG_FILE].size > _MAX_CONFIG_BYTES:
            config.unlink(missing_ok=True)
            return
        draft = config.with_name(".config")
        draft.write_bytes(self._opened().read(f"{model}/{CONFIG_FILE}"))
        draft.replace(config)

    @contextmanager
    def open(self, model: str) -> Iterator[Path]:
        """Yield a folder with all files of a model, which stays until the end of the body.

        Raises InvalidRequest, PayloadTooLarge, Unavailable.
        """
        for _ in range(_ATTEMPTS):
            objects = self._opened().list(model)
            check_model(f"{self._url}/{model}", objects, self._max_bytes)
            digest = _digest(f"{self._opened().identity}/{model}", objects)
            with ExitStack() as stack:
                try:
                    copy = self._copies.open(f"model-{digest}", partial(self._copy, model, objects))
                    folder = stack.enter_context(copy)
                except _Changed:
                    continue
                except OSError as error:
                    raise Unavailable(f"{self._url}/{model} cannot be copied: {error.strerror}", retryable=False) from error
                yield folder
                return
        raise Unavailable(f"{self._url}/{model} changes while it is read: load it again when its upload has ended")

    def _copy(self, model: str, objects: Objects, folder: Path) -> None:
        store = self._opened()
        store.download(model, objects, folder)
        if store.list(model) != objects:
            raise _Changed

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = open_store(self._url)
        return self._store


def _is_model(name: str) -> bool:
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return not name.startswith((".", "__"))


def _digest(place: str, objects: Objects) -> str:
    lines = [place, *(f"{name}\0{each.version}\0{each.size}" for name, each in sorted(objects.items()))]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
