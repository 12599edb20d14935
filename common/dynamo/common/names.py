"""Names that processes agree on: endpoints, instances, etcd keys and NATS subjects.

Model, namespace and component names come from people and from requests, and become NATS tokens and etcd path parts. `encode`
makes any accepted name one such token and `decode` undoes it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Annotated, NewType, TypeAlias

import msgspec

from dynamo.common.errors import InvalidRequest

InstanceId = NewType("InstanceId", int)
LAST_INSTANCE_ID = (1 << 63) - 1
GivenInstanceId: TypeAlias = Annotated[InstanceId, msgspec.Meta(ge=0, le=LAST_INSTANCE_ID)]
"""An id that another process says: one that is out of range could not be sent on."""

ROOT = "/dynamo/v1"
REPOSITORY_ROOT = f"{ROOT}/%repositories"
"""Below `ROOT`, so that one permission in etcd covers both; no encoded namespace looks like this."""
NAMES_ROOT = f"{ROOT}/%names"
"""Below `ROOT` for the same reason; one key per namespace, with its names for models."""
SETTINGS_ROOT = f"{ROOT}/%settings"
"""Below `ROOT` too; one key per namespace, with the trace and log settings that clients have changed."""
LEASES_ROOT = f"{ROOT}/%leases"
"""Below `ROOT` too; the work that one process of a namespace does at a time."""
ADAPTERS_ROOT = f"{ROOT}/%adapters"
"""Below `ROOT` too; one key for each LoRA adapter that was loaded at run time."""
STANDBY_ROOT = f"{ROOT}/%standby"
"""Below `ROOT` too; one key for each model and role that can be started when there are requests."""
MAX_NAME_CHARS = 256
_ALLOWED = re.compile(r"[A-Za-z0-9._/\-]")
_NAME = re.compile(rf"{_ALLOWED.pattern}{{1,{MAX_NAME_CHARS}}}")
_TOKEN = re.compile(r"[A-Za-z0-9_\-%]+")


def new_instance_id() -> InstanceId:
    """A random 63-bit id. It names one process start, and is the KV epoch too."""
    return InstanceId(secrets.randbits(63))


def check_name(name: str, what: str = "model name") -> str:
    """Returns `name` if it may be used; raises InvalidRequest naming the character that may not."""
    if _NAME.fullmatch(name):  # a registration may have 100,000
        return name
    if not name:
        raise InvalidRequest(f"the {what} is empty")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"the {what} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed")
    for character in name:
        if not _ALLOWED.fullmatch(character):
            raise InvalidRequest(f"the {what} has the character {character!r}; allowed are letters, digits and . _ / -")
    return name


def parse_name(text: str) -> str:
    """Return `text` if it is a valid name. Raises ValueError with the end of a sentence."""
    try:
        return check_name(text, "name")
    except InvalidRequest as error:
        raise ValueError(f"is not usable: {error}") from error


def encode(name: str, what: str = "model name") -> str:
    """One NATS token and etcd path part for `name`: `.` and `/` are percent-encoded, anything else odd is refused."""
    return check_name(name, what).replace(".", "%2E").replace("/", "%2F")


def decode(token: str) -> str:
    """Inverse of `encode`; raises ValueError for what `encode` cannot have made."""
    if not _TOKEN.fullmatch(token) or re.search(r"%(?!2E|2F)", token):
        raise ValueError(f"not an encoded name: {token!r}")
    return token.replace("%2E", ".").replace("%2F", "/")


def parse_instance(text: str) -> InstanceId:
    """An instance id from its hexadecimal form; raises InvalidRequest."""
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value <= LAST_INSTANCE_ID:
        raise InvalidRequest(f"{text[:40]!r} is not an instance id (up to 16 hexadecimal digits)")
    return InstanceId(value)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a set of equal instances serves, written `namespace.component.endpoint`."""

    namespace: str = "dynamo"
    component: str = "backend"
    name: str = "generate"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """From `namespace.component.endpoint`, with or without a leading `dyn://`."""
        parts = text.removeprefix("dyn://").split(".")
        if len(parts) != 3:
            raise InvalidRequest(f"endpoint {text!r} is not of the form namespace.component.endpoint")
        return cls(*(check_name(part, "endpoint name") for part in parts))

    def __str__(self) -> str:
        return f"{self.namespace}.{self.component}.{self.name}"

    @property
    def _tokens(self) -> tuple[str, str, str]:
        return (
            encode(self.namespace, "namespace"),
            encode(self.component, "component name"),
            encode(self.name, "endpoint name"),
        )

    def registration_key(self, model: str, instance: InstanceId) -> str:
        """The etcd key under which an instance of this endpoint registers one model."""
        namespace, component, name = self._tokens
        return f"{ROOT}/{namespace}/{component}/{name}/{encode(model)}/{instance:x}"

    def repository_key(self, instance: InstanceId) -> str:
        """The etcd key under which an instance of this endpoint registers its model repository."""
        namespace, component, name = self._tokens
        return f"{REPOSITORY_ROOT}/{namespace}/{component}/{name}/{instance:x}"

    def rpc_subject(self, instance: InstanceId) -> str:
        """NATS subject on which an instance takes requests."""
        return f"{component_subject(self.namespace, self.component)}.{instance:x}.rpc"

    def kv_subject(self, instance: InstanceId | None = None) -> str:
        """NATS subject of an instance's KV events; without an instance, the wildcard for all of the component."""
        return f"{component_subject(self.namespace, self.component)}.kv.{'*' if instance is None else f'{instance:x}'}"

    def load_subject(self, instance: InstanceId | None = None) -> str:
        """NATS subject of an instance's load reports; without an instance, the wildcard for all of the component."""
        return f"{component_subject(self.namespace, self.component)}.load.{'*' if instance is None else f'{instance:x}'}"

    def admission_subject(self, instance: InstanceId) -> str:
        """NATS subject on which an instance asks the frontends whether they have admitted it."""
        return f"{component_subject(self.namespace, self.component)}.admission.{instance:x}"

    def admitted_subject(self, instance: InstanceId) -> str:
        """NATS subject on which frontends respond to that."""
        return f"{component_subject(self.namespace, self.component)}.admitted.{instance:x}"

    def bookings_subject(self) -> str:
        """NATS subject on which frontends share their bookings."""
        return f"{component_subject(self.namespace, self.component)}.bookings"


def instance_of(subject: str) -> InstanceId:
    """The instance that publishes on a KV, load or admission subject; ValueError if none can."""
    return InstanceId(int(subject.rpartition(".")[2], 16))


def component_subject(namespace: str, component: str) -> str:
    return f"dynamo.{encode(namespace, 'namespace')}.{encode(component, 'component name')}"


def loads_subject(namespace: str) -> str:
    """The wildcard for the load reports of all instances in a namespace."""
    return f"dynamo.{encode(namespace, 'namespace')}.*.load.*"


def admissions_subject(namespace: str) -> str:
    """The wildcard for what all instances of a namespace ask frontends about their admission."""
    return f"dynamo.{encode(namespace, 'namespace')}.*.admission.*"


def admitted_reply(subject: str) -> str:
    """Return the subject of responses to what was asked on the admission subject of an instance."""
    component, _, instance = subject.rpartition(".admission.")
    return f"{component}.admitted.{instance}"


def frontends_subject(namespace: str) -> str:
    """NATS subject on which the frontends of a namespace publish what is set at run time."""
    return f"dynamo.{encode(namespace, 'namespace')}.frontends"


def limits_subject(namespace: str) -> str:
    """NATS subject on which the frontends of a namespace publish what they use of the limits of API keys."""
    return f"dynamo.{encode(namespace, 'namespace')}.limits"


def turns_subject(namespace: str) -> str:
    """NATS subject on which the frontends of a namespace publish which API keys wait in queues."""
    return f"dynamo.{encode(namespace, 'namespace')}.turns"


def stored_subject(namespace: str, id: str) -> str:
    """NATS subject on which the frontend that generates a stored response announces what it has stored of it."""
    return f"dynamo.{encode(namespace, 'namespace')}.stored.{id}"


def namespace_prefix(namespace: str | None) -> str:
    """The etcd prefix holding all registrations of a namespace, or of all namespaces."""
    return f"{ROOT}/" if namespace is None else f"{ROOT}/{encode(namespace, 'namespace')}/"


def repository_prefix(namespace: str | None) -> str:
    """The etcd prefix holding all registrations of model repositories of a namespace, or of all namespaces."""
    return f"{REPOSITORY_ROOT}/" if namespace is None else f"{REPOSITORY_ROOT}/{encode(namespace, 'namespace')}/"


def model_names_key(namespace: str) -> str:
    """The etcd key with the names for models that the operators of a namespace have set."""
    return f"{NAMES_ROOT}/{encode(namespace, 'namespace')}"


def server_settings_key(namespace: str) -> str:
    """The etcd key with the trace and log settings that clients of a namespace have changed."""
    return f"{SETTINGS_ROOT}/{encode(namespace, 'namespace')}"


def leases_prefix(namespace: str, work: str) -> str:
    """The etcd prefix of what processes of a namespace have taken of one kind of work."""
    return f"{LEASES_ROOT}/{encode(namespace, 'namespace')}/{work}/"


def adapters_prefix(namespace: str) -> str:
    """The etcd prefix of the LoRA adapters that the models of a namespace are to have, each under its encoded name."""
    return f"{ADAPTERS_ROOT}/{encode(namespace, 'namespace')}/"


def standby_prefix(namespace: str) -> str:
    """The etcd prefix of the models of a namespace that can be started."""
    return f"{STANDBY_ROOT}/{encode(namespace, 'namespace')}/"


def standby_key(namespace: str, role: str, model: str) -> str:
    """The etcd key of one model that can be started, in one role."""
    return f"{standby_prefix(namespace)}{role}/{encode(model)}"


def responses_prefix(namespace: str, client: str) -> str:
    """Return the NATS subject prefix of responses to one client process; `.{instance}` and `.{instance}.{batch}` follow it."""
    return f"dynamo.{encode(namespace, 'namespace')}.responses.{client}"
