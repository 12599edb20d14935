"""Records of models that can be started: what is written is read, and what does not belong there is not."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role, TensorSpec
from dynamo.common.names import Endpoint
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import (
    MAX_STANDBY_BYTES,
    Standby,
    decode_standby,
    delete_standby,
    encode_standby,
    put_standby,
)
from tests.support.fake_etcd import FakeEtcd

CARD = ModelCard(
    name="org/chat.v1",
    kind=ModelKind.LLM,
    role=Role.DECODE,
    llm=LlmInfo(context_length=8192, tokenizer="abc", adapters=("fine",)),
)
STANDBY = Standby(card=CARD, endpoint=Endpoint("prod"), start_s=41.5)
KEY = "/dynamo/v1/%standby/prod/decode/org%2Fchat%2Ev1"


def test_a_record_lies_under_namespace_role_and_model_and_is_read_as_it_was_written() -> None:
    assert STANDBY.key == KEY
    assert STANDBY.pool == Pool("org/chat.v1", Role.DECODE)
    assert decode_standby(KEY, encode_standby(STANDBY)) == STANDBY


async def test_a_record_that_is_put_is_there_until_it_is_deleted() -> None:
    etcd = FakeEtcd()
    await put_standby(etcd, STANDBY)
    [kv] = (await etcd.range("/dynamo/v1/%standby/prod/", prefix=True)).kvs
    assert decode_standby(kv.key, kv.value) == STANDBY
    await delete_standby(etcd, "prod", STANDBY.pool)
    assert etcd.kvs == {}


TWICE = (TensorSpec(name="x", datatype="FP32", shape=(1,)),) * 2


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (KEY, b"", "cannot be read"),
        (KEY, b"\xff", "cannot be read"),
        (KEY, b"[" * 100_000, "cannot be read"),
        (KEY, encode_standby(STANDBY).replace(b"41.5", b"-1"), "cannot be read"),
        (KEY, encode_standby(STANDBY).replace(b"41.5", b"1e300"), "cannot be read"),
        (KEY, b" " * (MAX_STANDBY_BYTES + 1), "at most"),
        (KEY.replace("decode", "prefill"), encode_standby(STANDBY), "belongs under"),
        (KEY.replace("prod", "test"), encode_standby(STANDBY), "belongs under"),
        (
            KEY,
            msgspec.json.encode(msgspec.structs.replace(STANDBY, card=msgspec.structs.replace(CARD, inputs=TWICE))),
            "two tensors",
        ),
        (KEY, msgspec.json.encode(msgspec.structs.replace(STANDBY, card=msgspec.structs.replace(CARD, name="a b"))), "character"),
    ],
)
def test_what_is_no_record_of_its_key_is_refused_with_the_reason(key: str, value: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        decode_standby(key, value)


def test_a_card_that_is_wrong_or_too_large_is_not_written() -> None:
    large = msgspec.structs.replace(CARD, labels={"text": "x" * MAX_STANDBY_BYTES})
    for card in (large, msgspec.structs.replace(CARD, versions=())):
        with pytest.raises(InvalidRequest):
            encode_standby(Standby(card=card, endpoint=Endpoint()))
