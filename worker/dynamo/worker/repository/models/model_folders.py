"""Where the files of models are: folders on this machine, repositories in object stores, and what a request brings with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from dynamo.common.errors import DynamoError, InvalidRequest, ModelNotFound
from dynamo.common.repository import LoadRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.layout import Fingerprint, fingerprint, model_folders, versions_in
from dynamo.worker.repository.declared.model_config import CONFIG_FILE, read_config
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stores.remote_repository import RemoteRepository
from dynamo.worker.repository.stores.source import ModelPaths, temporary_folder, write_files

log = logging.getLogger(__name__)


class ModelFolders:
    def __init__(self, folders: Sequence[Path], stores: Sequence[str], copies: ContentCache, paths: ModelPaths) -> None:
        """`stores`: URLs of repositories in object stores, of which `copies` keeps what was read. Raises InvalidRequest for a
        folder that does not exist.
        """
        remotes = [RemoteRepository(url, copies, paths.max_bytes) for url in stores]
        self._remote = {remote.index_folder: remote for remote in remotes}
        """By the folders that stand for them."""
        self._folders = (*folders, *self._remote)
        self._paths = paths

    def list_names(self) -> list[str]:
        """Return the names of all models, loaded or not. Raises InvalidRequest if a repository cannot be read."""
        return sorted(model_folders(self._folders))

    def refresh(self) -> list[DynamoError]:
        """Look at the repositories in object stores again. Blocks. Return the errors of those that cannot be read now."""
        errors: list[DynamoError] = []
        for remote in self._remote.values():
            try:
                remote.refresh()
            except DynamoError as error:
                log.error("%s", error)
                errors.append(error)
        return errors

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of every model's files; it is empty for a folder that cannot be read."""
        fingerprints: dict[str, Fingerprint] = {}
        for name, folders in model_folders(self._folders).items():
            try:
                fingerprints[name] = tuple(entry for folder in folders for entry in fingerprint(folder))
            except InvalidRequest as error:
                log.error("model '%s': %s", name, error)
                fingerprints[name] = ()
        return fingerprints

    def fingerprint(self, name: str) -> Fingerprint:
        return tuple(entry for folder in self.of(name) for entry in fingerprint(folder))

    def of(self, name: str) -> Sequence[Path]:
        """Return the folders of this name: none, one, or one in each of several repositories."""
        return model_folders(self._folders).get(name, ())

    def config(self, name: str) -> ModelConfig | None:
        """Return the configuration of a model; None if it has none that can be read."""
        for folder in self.of(name):
            try:
                return read_config(folder / CONFIG_FILE)
            except InvalidRequest:
                continue
        return None

    def newest_version(self, name: str) -> str:
        """Return the newest version in a model's folder; empty if there is none."""
        return next((str(versions_in(folder)[-1]) for folder in self.of(name) if versions_in(folder)), "")

    def is_ensemble(self, name: str) -> bool:
        try:
            return any(
                (folder / CONFIG_FILE).exists() and read_config(folder / CONFIG_FILE).HasField("ensemble_scheduling")
                for folder in self.of(name)
            )
        except InvalidRequest:
            return False  # loading it raises the same error

    async def open(self, request: LoadRequest, files: AsyncExitStack) -> Path:
        """Return the folder of the model that a request names, with its files. A temporary one is removed when `files` is closed.

        Raises ModelNotFound and InvalidRequest.
        """
        if request.files and request.path:
            raise InvalidRequest("a model comes from model_path or from the files of the request, not from both")
        if request.files:
            if not request.config:
                raise InvalidRequest("a request with files of the model needs the parameter 'config', too")
            folder = await files.enter_async_context(temporary_folder())
            await write_files(request.model, request.files, folder)
            return folder
        if request.path:
            where = await self._paths.find(request.path)
            if isinstance(where, Path):
                return where
            folder = await files.enter_async_context(temporary_folder())
            await self._paths.copy(where, folder)
            return folder
        folders = self.of(request.model)
        if not folders:
            raise ModelNotFound(request.model)
        if len(folders) > 1:
            raise InvalidRequest(f"several repositories have a model of this name: {', '.join(map(str, folders))}")
        remote = self._remote.get(folders[0].parent)
        if remote is not None:
            return await asyncio.to_thread(files.enter_context, remote.open(request.model))
        return folders[0]

    def close(self) -> None:
        for remote in self._remote.values():
            remote.close()
