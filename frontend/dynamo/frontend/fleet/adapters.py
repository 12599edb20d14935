"""LoRA adapters of the fleet's models: loaded and unloaded in all instances, by records in etcd that the instances follow.

A request returns when every instance of the model has reported what came of it. If none could load the adapter, its record is
taken back. If some could, it stays: these serve it, others try again, and `RepositoryIndex` says which do not have it and why.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from dynamo.common.adapters import DesiredAdapter, LoadAdapter, adapter_key, decode_adapter, encode_adapter
from dynamo.common.discovery import Instance
from dynamo.common.errors import AlreadyExists, Code, DynamoError, InvalidRequest, NotFound, Unavailable, Unsupported, from_wire
from dynamo.common.etcd import Etcd
from dynamo.common.model_card import AdapterReport
from dynamo.common.repository import ControlMode, IndexEntry, ModelState, RepositoryInstance
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.security.accounts import Account

log = logging.getLogger(__name__)

_VERSION = "1"
_LOOK_S = 1.0
"""While instances carry out a record, how often it is looked whether others have replaced or removed it."""


class Adapters:
    """The LoRA adapters that were loaded at run time into the models of a namespace.

    Two sentences are vLLM's own, since its clients look for them.
    """

    def __init__(self, etcd: Etcd, namespace: str, directory: Directory, timeout_s: float) -> None:
        """`timeout_s`: the longest that loading or unloading may take."""
        self._etcd = etcd
        self._namespace = namespace
        self._directory = directory
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        directory.on_change(self._changed.set)

    async def load(self, account: Account, request: LoadAdapter) -> None:
        """Load an adapter; return when every instance of the model has it.

        Raises AlreadyExists if its name is taken, the error of an instance that cannot load it, and what else is wrong.
        """
        account.permit(request.name)
        model = self._base_model(account, request.model)
        key = adapter_key(self._namespace, request.name)
        former, revision = await self._read(key)
        card = self._directory.card(request.name)
        if not request.in_place and (former is not None or card is not None):
            raise AlreadyExists(
                f"The lora adapter '{request.name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if former is not None and former.model != model:
            raise InvalidRequest(f"the adapter '{request.name}' belongs to model '{former.model}'", param="base_model_name")
        if former is None and card is not None and not (card.name == model and self._is_static(request.name)):
            raise AlreadyExists(f"the name '{request.name}' is taken by model '{card.name}'")
        adapter = DesiredAdapter(name=request.name, model=model, path=request.path)
        if not await self._etcd.replace(key, encode_adapter(adapter), mod_revision=revision):
            raise Unavailable(f"the adapter '{request.name}' is being changed by others at the same time; try again")
        reports = await self._reports(adapter)
        failed = {where: self._failure(report) for where, report in reports.items() if report is None or report.error}
        if not failed:
            return
        (code, reason), _ = Counter(failed.values()).most_common(1)[0]
        if len(failed) == len(reports):
            await self._take_back(key, adapter, former)
            raise from_wire(code, reason, retryable=False)
        where = ", ".join(f"{instance:x}" for instance, failure in sorted(failed.items()) if failure == (code, reason))
        text = f"the adapter '{request.name}' is served by {len(reports) - len(failed)} of {len(reports)} instances"
        raise from_wire(code, f"{text}, not by {where}: {reason}", retryable=False)

    def _failure(self, report: AdapterReport | None) -> tuple[str, str]:
        """Return code and reason of an adapter that is not loaded."""
        if report is None:
            return Code.UNAVAILABLE, f"no report within {self._timeout_s:g} s"
        return report.code, report.error

    async def unload(self, account: Account, name: str) -> None:
        """Unload an adapter; return when no instance serves it. Raises NotFound, and Unsupported for one of the workers' own."""
        account.permit(name)
        key = adapter_key(self._namespace, name)
        adapter, revision = await self._read(key)
        if adapter is None:
            if self._is_static(name):
                raise Unsupported(f"the adapter '{name}' belongs to the settings of the workers, and stays as long as they run")
            raise NotFound(f"The lora adapter '{name}' cannot be found.")
        if not await self._etcd.remove(key, mod_revision=revision):
            raise Unavailable(f"the adapter '{name}' is being changed by others at the same time; try again")
        try:
            async with asyncio.timeout(self._timeout_s):
                while any(_is_loaded(instance, name) for instance in self._instances(adapter.model)):
                    if not await self._change() and await self._differs(key, None):
                        return  # others have loaded it anew, so that it was unloaded is not to be seen
        except TimeoutError:
            raise Unavailable(f"some instances have not unloaded the adapter '{name}' within {self._timeout_s:g} s") from None

    def has(self, name: str) -> bool:
        """Return whether some instance has, or should have, an adapter that was loaded at run time."""
        return any(_is_loaded(instance, name) for instance in self._directory.registered())

    def index(self) -> Iterator[RepositoryInstance]:
        """Yield the adapters of each instance, in the form of a repository."""
        for instance in self._directory.registered():
            llm = instance.card.llm
            if llm is None or not llm.adapter_reports:
                continue
            entries = tuple(
                IndexEntry(
                    name=report.name,
                    version=_VERSION,
                    state=ModelState.READY if report.name in llm.adapters else ModelState.UNAVAILABLE,
                    reason=report.error,
                )
                for report in llm.adapter_reports
            )
            yield RepositoryInstance(
                id=instance.id, endpoint=instance.endpoint, subject=instance.subject, mode=ControlMode.EXPLICIT, entries=entries
            )

    def _base_model(self, account: Account, name: str) -> str:
        """Return the model that gets an adapter. Raises InvalidRequest, Unsupported, Forbidden."""
        models = sorted({instance.card.name for instance in self._loading(self._directory.registered())})
        if name:
            account.permit(name)
            card = self._directory.card(name)
            models = [] if card is None else [model for model in models if model == card.name]
        if not models:
            raise Unsupported("no instance loads LoRA adapters: that needs workers with --allow-runtime-lora")
        if len(models) > 1:
            raise InvalidRequest(
                f"'base_model_name' is required: {len(models)} models load LoRA adapters", param="base_model_name"
            )
        account.permit(models[0])
        return models[0]

    async def _read(self, key: str) -> tuple[DesiredAdapter | None, int]:
        """Return the record under `key` and the revision at which it was put; None and 0 if there is none."""
        kvs = (await self._etcd.range(key)).kvs
        if not kvs:
            return None, 0
        try:
            return decode_adapter(key, kvs[0].value), kvs[0].mod_revision
        except DynamoError as error:
            log.warning("the LoRA adapter at %s is left out: %s", key, error)
            return None, kvs[0].mod_revision

    async def _take_back(self, key: str, adapter: DesiredAdapter, former: DesiredAdapter | None) -> None:
        """Undo a record that no instance could carry out, unless it has changed meanwhile."""
        current, revision = await self._read(key)
        if current != adapter:
            return
        if former is None:
            await self._etcd.remove(key, mod_revision=revision)
        else:
            await self._etcd.replace(key, encode_adapter(former), mod_revision=revision)

    async def _reports(self, adapter: DesiredAdapter) -> dict[int, AdapterReport | None]:
        """Return what each instance reports, once all have; None for one that has not in time.

        Raises Unavailable if others unload or replace the adapter meanwhile.
        """
        key = adapter_key(self._namespace, adapter.name)
        reports: dict[int, AdapterReport | None] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    reports = {instance.id: _report_of(instance, adapter) for instance in self._instances(adapter.model)}
                    if reports and None not in reports.values():
                        return reports
                    if not await self._change() and await self._differs(key, adapter):
                        raise Unavailable(f"the adapter '{adapter.name}' was unloaded or replaced by others meanwhile")
        except TimeoutError:
            pass
        if not reports:
            raise Unavailable(f"the instances of '{adapter.model}' have left")
        return reports

    async def _change(self) -> bool:
        """Return True after a change of the fleet, False after a while without one."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                return await self._changed.wait()
        return False

    async def _differs(self, key: str, adapter: DesiredAdapter | None) -> bool:
        """Return whether there is another record than this one; None: whether there is one. While etcd is away, none differs."""
        with suppress(Unavailable):
            return (await self._read(key))[0] != adapter
        return False

    def _instances(self, model: str) -> list[Instance]:
        """Return the instances of a model that load adapters."""
        return [instance for instance in self._loading(self._directory.registered()) if instance.card.name == model]

    def _loading(self, instances: Iterable[Instance]) -> Iterator[Instance]:
        return (instance for instance in instances if instance.card.llm is not None and instance.card.llm.loads_adapters)

    def _is_static(self, name: str) -> bool:
        card = self._directory.card(name)
        return card is not None and card.llm is not None and name in card.llm.adapters


def _is_loaded(instance: Instance, name: str) -> bool:
    """Return whether an instance has, or should have, an adapter that was loaded at run time."""
    report = instance.card.adapter_report(name)
    return report is not None and bool(report.load_id)


def _report_of(instance: Instance, adapter: DesiredAdapter) -> AdapterReport | None:
    """Return what an instance reports about this loading of an adapter; None: nothing so far."""
    report = instance.card.adapter_report(adapter.name)
    return report if report is not None and report.load_id == adapter.load_id else None
