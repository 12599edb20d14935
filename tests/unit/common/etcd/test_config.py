from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from dynamo.common.errors import DynamoError, Forbidden, InvalidRequest, Unauthenticated
from dynamo.common.etcd import Compacted, EtcdUnavailable, LeaseLost
from dynamo.common.etcd.config import check_etcd, parse_endpoint, uses_etcd_tls
from dynamo.common.etcd.errors import TokenExpired, from_text
from dynamo.common.etcd.kv import from_key, interval, to_key
from dynamo.common.etcd.transport import backoff
from dynamo.common.options import EtcdOptions


@pytest.mark.parametrize(
    ("endpoint", "target", "tls"),
    [
        ("http://10.0.0.1:2379", "10.0.0.1:2379", False),
        ("https://etcd.example:443/", "etcd.example:443", True),
        ("etcd-0.etcd", "etcd-0.etcd:2379", False),
        ("[::1]:23", "[::1]:23", False),
        ("http://[fe80::1%eth0]", "[fe80::1%eth0]:2379", False),
    ],
)
def test_endpoints_may_be_written_in_every_usual_way(endpoint: str, target: str, tls: bool) -> None:
    assert parse_endpoint(endpoint, default_tls=False) == (target, tls)


@pytest.mark.parametrize("endpoint", ["", "ftp://host", "host:", "host:0", "host:70000", "a b", "::1", "http://u:p@h:1"])
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        parse_endpoint(endpoint, default_tls=False)


def test_certificates_turn_tls_on_for_endpoints_without_a_scheme(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(ca)
    options = EtcdOptions(endpoints=("host:1",), tls_ca_file=str(ca))
    check_etcd(options)
    assert parse_endpoint(options.endpoints[0], uses_etcd_tls(options)) == ("host:1", True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EtcdOptions(endpoints=("http://a", "https://b")), "mix"),
        (EtcdOptions(tls_ca_file="x"), "endpoints say http"),
        (EtcdOptions(endpoints=("a",), tls_ca_file="/nowhere/ca.pem"), "cannot be read"),
        (EtcdOptions(timeout_s=0), "timeout_s"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: EtcdOptions, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_etcd(options)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoints": ()}, "--etcd-endpoints names no server"),
        ({"endpoints": ("a",), "tls_cert_file": "x"}, "--etcd-tls-cert-file needs --etcd-tls-key-file as well"),
        ({"user": "u"}, "--etcd-user needs --etcd-password-file as well"),
    ],
)
def test_options_that_lack_their_counterpart_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EtcdOptions(**fields)


def test_the_password_is_not_shown() -> None:
    assert "sesame" not in repr(EtcdOptions(user="u", password="sesame"))


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("/a/", (b"/a/", b"/a0")),
        ("a\udcff", (b"a\xff", b"b")),
        ("\udcff", (b"\xff", b"\0")),
        ("", (b"\0", b"\0")),
    ],
)
def test_a_prefix_is_the_interval_up_to_its_successor(prefix: str, expected: tuple[bytes, bytes]) -> None:
    assert interval(prefix, prefix=True) == expected


def test_a_key_of_any_bytes_comes_through_unchanged() -> None:
    assert to_key(from_key(b"\xff\x00/\xc3")) == b"\xff\x00/\xc3"


@pytest.mark.parametrize(
    ("text", "status", "kind"),
    [
        ("etcdserver: requested lease not found", grpc.StatusCode.NOT_FOUND, LeaseLost),
        ("etcdserver: invalid auth token", grpc.StatusCode.UNAUTHENTICATED, TokenExpired),
        ("etcdserver: mvcc: required revision has been compacted", grpc.StatusCode.OUT_OF_RANGE, Compacted),
        ("etcdserver: permission denied", grpc.StatusCode.PERMISSION_DENIED, Forbidden),
        ("rpc error: code = PermissionDenied desc = etcdserver: permission denied", None, Forbidden),
        (
            "etcdserver: authentication failed, invalid user ID or password",
            grpc.StatusCode.INVALID_ARGUMENT,
            Unauthenticated,
        ),
        ("etcdserver: no leader", grpc.StatusCode.UNAVAILABLE, EtcdUnavailable),
        ("etcdserver: no leader", None, EtcdUnavailable),
        ("etcdserver: mvcc: database space exceeded", grpc.StatusCode.INTERNAL, DynamoError),
    ],
)
def test_failures_of_etcd_are_told_apart(text: str, status: grpc.StatusCode | None, kind: type[DynamoError]) -> None:
    assert type(from_text(text, "host:1", status)) is kind


def test_pauses_grow_up_to_the_longest() -> None:
    pauses = backoff(1.0)
    first = [next(pauses) for _ in range(12)]
    assert first[0] <= 0.05
    assert all(0.5 <= pause <= 1.0 for pause in first[-3:])
