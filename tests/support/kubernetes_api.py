"""The API server of Kubernetes, as far as workloads are scaled and pods marked: paths, statuses, conflicts, RBAC, media types.

What it responds was taken from the sources of Kubernetes 1.32: texts of refusals, versions of objects that change only with the
object, patches by media type, pages of lists, and in which order a ReplicaSet ends its pods.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.certificates import Pair

NAMESPACE = "dynamo"
USER = f"system:serviceaccount:{NAMESPACE}:dynamo-planner"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_SCALE = re.compile(r"/apis/apps/v1/namespaces/([^/]+)/(deployments|statefulsets)/([^/]+)/scale")
_PODS = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+))?")
_REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid"}

Json = dict[str, Any]


class Refused(Exception):
    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or _REASONS[status]


@dataclass
class Pod:
    name: str
    labels: dict[str, str]
    ready: bool = True
    annotations: dict[str, str] = field(default_factory=dict)
    started: int = 0

    @property
    def cost(self) -> int:
        return int(self.annotations.get(DELETION_COST, "0"))


@dataclass
class Workload:
    kind: str
    name: str
    replicas: int
    version: int
    labels: dict[str, str]


class KubernetesApiServer:
    """Workloads and pods of one namespace. What was called is in `calls`: (verb, path)."""

    def __init__(self, rules: Sequence[Json]) -> None:
        """`rules` of the Role of the only user, as in a manifest."""
        self.rules = list(rules)
        self.tokens = {"first-token"}
        self.workloads: dict[tuple[str, str], Workload] = {}
        self.pods: dict[str, Pod] = {}
        self.calls: list[tuple[str, str]] = []
        self.refusals: list[tuple[int, Mapping[str, str], bytes]] = []
        """What the next calls get instead of a response: status, headers, body."""
        self.on_call: Callable[[str, str], None] = lambda verb, path: None
        """Is called before a call is served."""
        self.page = 500
        self.port = 0
        self._version = 100
        self._lock = threading.Lock()

    def add_workload(self, kind: str, name: str, replicas: int) -> Workload:
        workload = Workload(kind, name, replicas, self._next_version(), {"app": name})
        self.workloads[kind, name] = workload
        for _ in range(replicas):
            self._add_pod(workload)
        return workload

    def pods_of(self, workload: Workload) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.labels == workload.labels]

    def reconcile(self) -> None:
        """Make the pods as many as are wanted, as the controllers of workloads do."""
        for workload in self.workloads.values():
            pods = self.pods_of(workload)
            for _ in range(workload.replicas - len(pods)):
                self._add_pod(workload)
            if workload.kind == "deployments":
                order = sorted(pods, key=lambda pod: (pod.ready, pod.cost, -pod.started))
            else:
                order = list(reversed(pods))
            for pod in order[: max(0, len(pods) - workload.replicas)]:
                del self.pods[pod.name]

    def _add_pod(self, workload: Workload) -> None:
        started = self._next_version()
        ordinal = len(self.pods_of(workload))
        name = f"{workload.name}-{ordinal if workload.kind == 'statefulsets' else f'7d9c5b-{started}'}"
        self.pods[name] = Pod(name, dict(workload.labels), started=started)

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def serve(self, verb: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[str, Json]:
        """Return the media type and the body of the response to a call. Raises Refused."""
        url = urlsplit(target)
        if headers.get("authorization", "") not in {f"Bearer {token}" for token in self.tokens}:
            raise Refused(401, "Unauthorized")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if (scale := _SCALE.fullmatch(url.path)) is not None:
            namespace, kind, name = scale.groups()
            self._authorise(verb, namespace, "apps", kind, "scale", name)
            return "application/json", self._scale(verb, kind, name, headers, body)
        if (pods := _PODS.fullmatch(url.path)) is not None:
            namespace, pod = pods.groups()
            self._authorise("list" if pod is None and verb == "get" else verb, namespace, "", "pods", "", pod or "")
            if pod is not None and verb == "patch":
                return "application/json", self._patch_pod(pod, headers, body)
            if pod is None and verb == "get":
                return self._list_pods(query, headers.get("accept", ""))
        raise Refused(404, "the server could not find the requested resource")

    def _authorise(self, verb: str, namespace: str, group: str, resource: str, subresource: str, name: str) -> None:
        full = f"{resource}/{subresource}" if subresource else resource
        for rule in self.rules:
            names = rule.get("resourceNames")
            fits = group in rule["apiGroups"] and full in rule["resources"] and verb in rule["verbs"]
            if namespace == NAMESPACE and fits and (not names or name in names):
                return
        kind = f"{resource}.{group}" if group else resource
        named = f' "{name}"' if name else ""
        where = f'in API group "{group}" in the namespace "{namespace}"'
        raise Refused(403, f'{kind}{named} is forbidden: User "{USER}" cannot {verb} resource "{full}" {where}')

    def _scale(self, verb: str, kind: str, name: str, headers: Mapping[str, str], body: bytes) -> Json:
        workload = self.workloads.get((kind, name))
        if workload is None:
            raise Refused(404, f'{kind}.apps "{name}" not found')
        if verb == "patch":
            patch = _merge_patch(headers, body)
            version = patch.get("metadata", {}).get("resourceVersion")
            if version not in (None, str(workload.version)):
                text = "the object has been modified; please apply your changes to the latest version and try again"
                raise Refused(409, f'Operation cannot be fulfilled on {kind}.apps "{name}": {text}')
            replicas = patch.get("spec", {}).get("replicas", workload.replicas)
            if not isinstance(replicas, int):
                raise Refused(400, "json: cannot unmarshal into Go struct field ScaleSpec.spec.replicas of type int32")
            if replicas < 0:
                text = "must be greater than or equal to 0"
                raise Refused(422, f'Scale.autoscaling "{name}" is invalid: spec.replicas: Invalid value: {replicas}: {text}')
            if replicas != workload.replicas:
                workload.replicas, workload.version = replicas, self._next_version()
        elif verb != "get":
            raise Refused(404, "the server could not find the requested resource")
        metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(workload.version), "uid": "u"}
        # A number that is 0 is left out, as Go does.
        spec = {"replicas": workload.replicas} if workload.replicas else {}
        selector = ",".join(f"{key}={value}" for key, value in workload.labels.items())
        status = {"replicas": len(self.pods_of(workload)), "selector": selector}
        return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}

    def _list_pods(self, query: Mapping[str, str], accept: str) -> tuple[str, Json]:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        found = [pod for pod in self.pods.values() if wanted.items() <= pod.labels.items()]
        start = int(query.get("continue", "0"))
        limit = min(int(query.get("limit", "500")), self.page)
        page = found[start : start + limit]
        metadata: Json = {"resourceVersion": str(self._version)}
        if start + limit < len(found):
            metadata["continue"] = str(start + limit)
        if "as=PartialObjectMetadataList" not in accept:
            whole = [{"metadata": _metadata(pod), "spec": {"containers": [{"name": "worker"}]}} for pod in page]
            return "application/json", {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": whole}
        items: list[Json] = [{"kind": "PartialObjectMetadata", "metadata": _metadata(pod)} for pod in page]
        content = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items}
        return "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", content

    def _patch_pod(self, name: str, headers: Mapping[str, str], body: bytes) -> Json:
        patch = _merge_patch(headers, body)
        pod = self.pods.get(name)
        if pod is None:
            raise Refused(404, f'pods "{name}" not found')
        annotations: dict[str, str | None] = {**pod.annotations, **patch.get("metadata", {}).get("annotations", {})}
        cost = annotations.get(DELETION_COST)
        if cost is not None and (not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", cost) or not -(2**31) <= int(cost) < 2**31):
            raise Refused(422, f'Pod "{name}" is invalid: metadata.annotations[{DELETION_COST}]: must be a 32bit integer')
        pod.annotations = {key: value for key, value in annotations.items() if value is not None}
        return {"kind": "Pod", "apiVersion": "v1", "metadata": _metadata(pod), "spec": {"containers": [{"name": "worker"}]}}

    def respond(self, verb: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        with self._lock:
            self.calls.append((verb, urlsplit(target).path))
            self.on_call(verb, urlsplit(target).path)
            if self.refusals:
                return self.refusals.pop(0)
            try:
                media_type, content = self.serve(verb, target, headers, body)
                return 200, {"content-type": media_type}, json.dumps(content).encode()
            except Refused as error:
                status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": str(error)}
                content = {**status, "reason": error.reason, "code": error.status}
                return error.status, {"content-type": "application/json"}, json.dumps(content).encode()


def _metadata(pod: Pod) -> Json:
    metadata: Json = {"name": pod.name, "namespace": NAMESPACE, "labels": pod.labels, "resourceVersion": str(pod.started)}
    return metadata | ({"annotations": pod.annotations} if pod.annotations else {})


def _merge_patch(headers: Mapping[str, str], body: bytes) -> Json:
    media_type = headers.get("content-type", "")
    if media_type != "application/merge-patch+json":
        accepted = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
        text = f"the body of the request was in an unknown format - accepted media types include: {accepted}"
        raise Refused(415, text, "UnsupportedMediaType")
    content: Json = json.loads(body)
    return content


@contextmanager
def serving_kubernetes_api(server: KubernetesApiServer, certificate: Pair, port: int = 0) -> Iterator[None]:
    """Serve over HTTPS on 127.0.0.1 while the body runs; `server.port` says where."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, fields, content = server.respond(self.command.lower(), self.path, headers, body)
            self.send_response(status)
            for name, value in {**fields, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = respond

        def log_message(self, format: str, *args: object) -> None: ...

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Clients go as they like."""

    listener = Listener(("127.0.0.1", port), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    listener.socket = context.wrap_socket(listener.socket, server_side=True, do_handshake_on_connect=False)
    server.port = listener.server_address[1]
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, name="API server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
