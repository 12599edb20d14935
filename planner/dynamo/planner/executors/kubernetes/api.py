"""The calls of Kubernetes' API that are needed: an object's scale, the pods of an object."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar
from urllib.parse import quote

import msgspec

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.http.client import HttpClient, HttpResponse
from dynamo.planner.executors.kubernetes.service_account import ServiceAccount

T = TypeVar("T")

MERGE_PATCH = "application/merge-patch+json"
_JSON = "application/json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Names and annotations of pods: the whole would be some 10 kB for each."""
_PODS_PER_PAGE = 500
MAX_PODS = 10_000
_MAX_RETRY_AFTER_S = 60.0
_MAX_MESSAGE_CHARS = 300


class Kind(StrEnum):
    """What runs pods, as it is called in paths."""

    DEPLOYMENT = "deployments"
    STATEFULSET = "statefulsets"


class ApiUnreachable(Unavailable):
    """The API server cannot be reached, or does not speak its protocol."""


class ApiRefused(Unavailable):
    """The API server refused a call."""

    def __init__(self, message: str, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        """How long it is to be left alone, as it says with 429 and 503."""


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    """Changes with each change of the object."""
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    """Set while the object ends."""


class ScaleSpec(msgspec.Struct, frozen=True, kw_only=True):
    replicas: int = 0


class ScaleStatus(msgspec.Struct, frozen=True, kw_only=True):
    selector: str = ""
    """Which labels its pods have, as in a query."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """What the subresource `scale` of a Deployment or StatefulSet says: `autoscaling/v1`, `Scale`."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ScaleSpec = ScaleSpec()
    status: ScaleStatus = ScaleStatus()


class PodMetadata(msgspec.Struct, frozen=True, kw_only=True):
    metadata: ObjectMeta = ObjectMeta()


class ListMeta(msgspec.Struct, frozen=True, kw_only=True):
    continue_: str = msgspec.field(name="continue", default="")
    """With which the next page begins; empty: this is the last one."""


class PodMetadataList(msgspec.Struct, frozen=True, kw_only=True):
    metadata: ListMeta = ListMeta()
    items: tuple[PodMetadata, ...] = ()


class _ApiStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a refusal."""

    message: str = ""


class KubernetesApi:
    """Calls in one namespace. Each raises ApiUnreachable or ApiRefused."""

    def __init__(self, http: HttpClient, account: ServiceAccount, namespace: str) -> None:
        self._http = http
        self._account = account
        self._namespace = quote(namespace, safe="")

    async def scale(self, kind: Kind, name: str) -> Scale:
        return await self._call("GET", self._scale_path(kind, name), Scale)

    async def set_replicas(self, kind: Kind, name: str, replicas: int, resource_version: str) -> Scale:
        """Set the number of pods of an object that has not changed since `resource_version`; refused with 409 if it has."""
        body = {"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": replicas}}
        return await self._call("PATCH", self._scale_path(kind, name), Scale, body)

    async def pods(self, selector: str) -> list[ObjectMeta]:
        """Return the metadata of the pods whose labels fit `selector`: of MAX_PODS at most."""
        pods: list[ObjectMeta] = []
        after = ""
        while len(pods) < MAX_PODS:
            query = f"labelSelector={quote(selector, safe='')}&limit={_PODS_PER_PAGE}"
            if after:
                query += f"&continue={quote(after, safe='')}"
            page = await self._call("GET", f"{self._pods_path}?{query}", PodMetadataList, accept=_METADATA_ONLY)
            pods += [item.metadata for item in page.items]
            after = page.metadata.continue_
            if not after or not page.items:  # pages without pods, each of which names a next one, would never end
                break
        return pods

    async def annotate_pod(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Set annotations of a pod; None takes one away."""
        body = {"metadata": {"annotations": dict(annotations)}}
        await self._call("PATCH", f"{self._pods_path}/{quote(name, safe='')}", PodMetadata, body)

    def close(self) -> None:
        self._http.close()

    def _scale_path(self, kind: Kind, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self._namespace}/{kind}/{quote(name, safe='')}/scale"

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def _call(self, method: str, path: str, result: type[T], body: object = None, *, accept: str = _JSON) -> T:
        headers = {"authorization": f"Bearer {self._account.token()}", "accept": accept, "user-agent": "dynamo-planner"}
        if body is not None:
            headers["content-type"] = MERGE_PATCH
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            async with self._http.send(method, path, data, headers) as response:
                content = await response.read()
        except (Unavailable, EngineError) as error:
            raise ApiUnreachable(f"the API server of Kubernetes: {error}") from error
        if response.status != 200:
            raise _refusal(method, path.partition("?")[0], response, content)
        try:
            return msgspec.json.decode(content, type=result)
        except (ValueError, RecursionError) as error:
            raise ApiUnreachable(
                f"the API server's response to {method} {path.partition('?')[0]} cannot be read: {error}"
            ) from error


def _refusal(method: str, path: str, response: HttpResponse, content: bytes) -> ApiRefused:
    try:
        message = msgspec.json.decode(content, type=_ApiStatus).message
    except (ValueError, RecursionError):
        message = content[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace")
    text = f"{method} {path}: {response.status} {' '.join(message.split())[:_MAX_MESSAGE_CHARS]}".rstrip()
    return ApiRefused(text, response.status, _retry_after_s(response.headers.get("retry-after", "")))


def _retry_after_s(text: str) -> float:
    """Return the seconds of a Retry-After header, which the API server gives as a number; 0 for anything else."""
    return min(float(text[:9]), _MAX_RETRY_AFTER_S) if text.isdecimal() and text.isascii() else 0.0
