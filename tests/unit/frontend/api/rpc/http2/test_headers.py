"""Header blocks: those of requests against an independent encoder, those of responses against an independent decoder."""

from __future__ import annotations

import logging

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.frontend.api.rpc.http2.frames import ConnectionFailure, ErrorCode
from dynamo.frontend.api.rpc.http2.headers import HeaderDecoder, HeaderEncoder, MalformedRequest, read_headers
from tests.support.http2 import PATH, block, fields
from tests.support.memory import kept_bytes

LIMIT = 16 * 1024
OK = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-accept-encoding", "identity,deflate,gzip")]


def encode(pairs: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


def test_the_headers_of_a_call_are_read() -> None:
    pairs = fields(PATH, ("grpc-timeout", "250m"), ("grpc-encoding", "gzip"), ("x-id", "7"), ("x-blob-bin", "AAE"), ("x-id", "8"))
    headers = HeaderDecoder(LIMIT).decode(block(pairs))
    assert headers.path == PATH.encode()
    assert headers.metadata == (("x-id", "7"), ("x-blob-bin", b"\0\1"), ("x-id", "8"))
    assert (headers.timeout_s, headers.encoding, headers.refusal) == (0.25, "gzip", None)


@given(
    st.lists(st.tuples(st.sampled_from(["x-a", "x-b", "x-c"]), st.sampled_from(["1", "2", "3" * 50]), st.booleans()), max_size=60)
)
def test_remembered_blocks_mean_what_they_meant(calls: list[tuple[str, str, bool]]) -> None:
    """An encoder that changes its table at any time, and repeats blocks."""
    encoder, decoder = hpack.Encoder(), HeaderDecoder(LIMIT)
    for name, value, is_indexed in calls:
        kind = hpack.HeaderTuple if is_indexed else hpack.NeverIndexedHeaderTuple
        pairs = [*fields(), (name, value)]
        encoded = encoder.encode([kind(*pair) for pair in pairs])
        assert decoder.decode(encoded).metadata == ((name, value),)


def test_a_repeated_block_is_decoded_once_until_the_table_changes() -> None:
    decoder = HeaderDecoder(LIMIT)
    first = decoder.decode(block())
    assert decoder.decode(block()) is first
    decoder.decode(block() + b"\x40\x01x\x01y")  # a new entry of the table
    assert decoder.decode(block()) is not first


def test_remembered_blocks_that_name_a_long_entry_many_times_take_little() -> None:
    decoder = HeaderDecoder(64 * 1024)
    decoder.decode(block() + b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000)  # the newest entry of the table, 62
    before = kept_bytes(decoder)
    for number in range(64):
        named = decoder.decode(block() + b"\xbe" * 15 + b"\0\x01n\x02%02d" % number)
        assert len(named.metadata) == 16
    assert kept_bytes(decoder) - before < 64 * 1024


def test_a_block_may_begin_with_two_updates_of_the_tables_size() -> None:
    decoder = HeaderDecoder(LIMIT)
    assert decoder.decode(b"\x20\x3f\xe1\x1f" + block()).path == PATH.encode()


@pytest.mark.parametrize("updates", [b"\x20" * 3, b"\x3f\xe1\x1f\x20\x3f\xe1\x1f", b"\x3e" * 10_000])
def test_more_than_two_updates_of_the_tables_size_are_refused_before_they_are_decoded(
    updates: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hpack.Decoder, "decode")
    with pytest.raises(ConnectionFailure) as caught:
        HeaderDecoder(LIMIT).decode(updates + block())
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR
    assert "over two updates" in str(caught.value)


def test_decoded_headers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    HeaderDecoder(LIMIT).decode(hpack.Encoder().encode([*fields(), ("authorization", "Bearer secret")]))
    assert not caplog.records


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(":method", "POST"), (":scheme", "http")], "needs :method, :scheme and :path"),
        ([*fields(), (":path", "/x")], ":path"),
        ([(":status", "200"), *fields()], ":status"),
        ([*fields(), ("X-Upper", "a")], "X-Upper"),
        ([*fields(), ("x y", "a")], "x y"),
        ([*fields(), ("", "a")], "the header name"),
        ([*fields(), ("x", "a\r\nb")], "value"),
        ([*fields(), ("x", " a")], "value"),
        ([*fields(), ("connection", "close")], "connection"),
        ([*fields(), ("transfer-encoding", "chunked")], "transfer-encoding"),
        ([*fields()[:4], ("te", "gzip")], "te"),
        ([*fields(), ("content-length", "1"), ("content-length", "2")], "content-length"),
        ([*fields(), ("content-length", "-1")], "content-length"),
    ],
)
def test_headers_that_break_a_rule_are_malformed(pairs: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(MalformedRequest, match=words):
        read_headers(encode(pairs))


@pytest.mark.parametrize(
    ("pairs", "http_status", "words"),
    [
        ([(":method", "GET"), *fields()[1:]], 405, "method POST, got 'GET'"),
        ([*fields()[:5], ("content-type", "text/html")], 415, "got 'text/html'"),
        (fields()[:5], 415, "got ''"),
        ([*fields()[:5], ("content-type", "application/grpc-web")], 415, "application/grpc"),
        (fields(PATH, ("grpc-timeout", "soon")), 200, "grpc-timeout must be up to 8 digits"),
        (fields(PATH, ("grpc-timeout", "999999999S")), 200, "grpc-timeout must be up to 8 digits"),
        (fields(PATH, ("x-bin", "!")), 200, "'x-bin' is not base64"),
        (fields(PATH, ("x-id", "\udce9")), 200, "'x-id' is not text"),
    ],
)
def test_what_is_no_grpc_is_refused_with_a_sentence(pairs: list[tuple[str, str]], http_status: int, words: str) -> None:
    raw = [(name.encode(), value.encode(errors="surrogateescape")) for name, value in pairs]
    refusal = read_headers(raw).refusal
    assert refusal is not None
    assert refusal.http_status == http_status
    assert words in refusal.text


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_the_content_types_of_grpc_are_taken(kind: str) -> None:
    assert read_headers(encode([*fields()[:5], ("content-type", kind)])).refusal is None


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"\xff\xff\xff\x0f", ErrorCode.COMPRESSION_ERROR),
        (b"\x7f" + b"\xff" * 60, ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x7f\xff\xff\x03abc", ErrorCode.COMPRESSION_ERROR),
        (b"\x40", ErrorCode.COMPRESSION_ERROR),
        (b"\x3f\xe1\xff\x03", ErrorCode.COMPRESSION_ERROR),
        (b"\x40\x01x\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 100, ErrorCode.ENHANCE_YOUR_CALM),
    ],
    ids=["index beyond the table", "integer without end", "string beyond its end", "nothing", "table above the limit", "bomb"],
)
def test_blocks_that_cannot_be_decoded_end_the_connection(bad: bytes, code: ErrorCode) -> None:
    with pytest.raises(ConnectionFailure) as failure:
        HeaderDecoder(LIMIT).decode(block() + bad if code is ErrorCode.ENHANCE_YOUR_CALM else bad)
    assert failure.value.code is code


def test_the_blocks_of_responses_are_understood_in_any_order() -> None:
    encoder, decoder = HeaderEncoder(), hpack.Decoder()
    for _ in range(3):
        assert decoder.decode(encoder.failure(5, "no: é%", (("x-id", "a"),))) == [
            *OK, ("grpc-status", "5"), ("grpc-message", "no: %C3%A9%25"), ("x-id", "a"),
        ]  # fmt: skip
        assert decoder.decode(encoder.response()) == OK
        assert decoder.decode(encoder.response("gzip")) == [*OK, ("grpc-encoding", "gzip")]
        assert decoder.decode(encoder.success()) == [("grpc-status", "0")]
        assert decoder.decode(encoder.trailers(0, "", (("x-bin", b"\0"),))) == [("grpc-status", "0"), ("x-bin", "AA")]
        assert decoder.decode(encoder.response()) == OK


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_client_that_shrinks_its_table_is_understood_at_once(before: int) -> None:
    encoder, decoder = HeaderEncoder(), hpack.Decoder()
    for _ in range(before):
        decoder.decode(encoder.response())
        decoder.decode(encoder.success())
    encoder.table_resized(0)
    decoder.max_allowed_table_size = 0
    for _ in range(2):
        assert decoder.decode(encoder.response()) == OK
        assert decoder.decode(encoder.success()) == [("grpc-status", "0")]
        assert decoder.decode(encoder.failure(13, "", ())) == [*OK, ("grpc-status", "13")]


@given(st.text(max_size=300))
def test_any_message_is_sent_as_printable_ascii(text: str) -> None:
    pairs = dict(hpack.Decoder().decode(HeaderEncoder().trailers(2, text, ())))
    assert str(pairs.get("grpc-message", "")).isascii()
