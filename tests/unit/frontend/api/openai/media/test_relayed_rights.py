"""What a caller may say to a server that a relay is in front of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.guided_rules import CostlyGuide
from dynamo.common.tensors.relay import RelayedPart, from_tensors, part_to_outputs
from dynamo.common.tensors.request import TensorRequest, build_response
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.openai.media.relayed_bodies import FormBody, JsonBody
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.security.accounts import ANONYMOUS, WITHOUT_KEY, Account, KeyAccount
from dynamo.frontend.security.keys import MAX_PRIORITY, ApiKey, Limits, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from tests.support.every_operation import MEDIA, form, open_frontend
from tests.support.fakes import FakeStream

ENDLESS = {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000_000}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}
ENDLESS_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": ENDLESS}}
KEY = KeyAccount(ApiKey(name="team", salt=b"", digest=b""))
OF_SOME_MODELS = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", models=("whisper",), max_priority=MAX_PRIORITY))


def permit(account: Account, **said: Any) -> dict[str, Any]:
    """What a server gets of a chat."""
    body = JsonBody(json.dumps({"model": "m", "messages": [], **said}).encode(), 100)
    body.permit(account, 128)
    sent: dict[str, Any] = json.loads(body.naming("m"))
    return sent


@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_host", "custom_logit_processor", "logits_processors"]
)
def test_no_key_has_a_server_fetch_caches_from_elsewhere_or_run_code(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' is not for the API key 'team'"):
        permit(KEY, **{name: "x"})
    escaped = '{"model": "m", "' + "".join(f"\\u{ord(letter):04x}" for letter in name) + '": "x"}'
    with pytest.raises(InvalidRequest, match=name):
        JsonBody(escaped.encode(), 100).permit(KEY, 128)
    assert permit(KEY, **{name: None})[name] is None and permit(ANONYMOUS, **{name: "x"})[name] == "x"
    field = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\nx\r\n--b--' % name.encode()
    with pytest.raises(InvalidRequest, match=name):
        FormBody(form("m", b"x").replace(b"--b--", field), "multipart/form-data; boundary=b").permit(KEY, 128)


def test_where_there_are_keys_a_caller_without_one_says_no_more_than_they() -> None:
    for said in ({"kv_transfer_params": "x"}, {"ebnf": "x"}, {"priority": -5}):
        with pytest.raises(InvalidRequest, match="a caller without an API key"):
            permit(WITHOUT_KEY, **said)


def test_no_key_has_a_server_enlarge_media() -> None:
    assert permit(KEY, mm_processor_kwargs={"use_audio_in_video": True})
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        permit(KEY, mm_processor_kwargs={"min_pixels": 10**12})


def test_a_key_says_neither_a_priority_nor_an_adapter_beyond_its_own() -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        permit(KEY, priority=-5)
    assert permit(KEY, priority=0, lora="a") and permit(OF_SOME_MODELS, priority=-5)
    with pytest.raises(InvalidRequest, match="lora"):
        permit(OF_SOME_MODELS, lora={"path": "/adapters/other"})


@pytest.mark.parametrize("account", [KEY, ANONYMOUS])
@pytest.mark.parametrize(
    "said",
    [
        {"response_format": SCHEMA},
        {"structured_outputs": {"json": json.dumps(ENDLESS)}},
        {"guided_regex": "a{1000}{1000}"},
        {"tools": [ENDLESS_TOOL], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {**ENDLESS_TOOL["function"], "strict": True}}]},
    ],
)
def test_no_server_hears_of_structured_output_beyond_its_bounds(account: Account, said: dict[str, Any]) -> None:
    with pytest.raises(CostlyGuide):
        permit(account, **said)


def test_nor_of_guides_that_only_servers_know() -> None:
    with pytest.raises(CostlyGuide):
        permit(ANONYMOUS, regex="a{1000}{1000}")
    assert permit(ANONYMOUS, regex="a+")


def test_with_a_key_structured_output_has_to_be_understood() -> None:
    small = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert permit(KEY, response_format=small, tools=[tool, {"type": "function", "function": {"name": "g"}}])
    assert permit(KEY, response_format="mp3", text="x") and permit(KEY, guided_json='{"type": "object"}')
    for said in ({"ebnf": "x"}, {"text": {"format": 1}}, {"response_format": {"type": "odd"}}, {"tools": [3]}):
        with pytest.raises(InvalidRequest):
            permit(KEY, **said)
        assert permit(ANONYMOUS, **said)


@pytest.mark.parametrize("account", [KEY, ANONYMOUS])
def test_a_server_renders_the_template_of_its_model(account: Account) -> None:
    assert permit(account, chat_template_kwargs={"enable_thinking": True}, chat_template=None)
    for said in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}, {"chat_template_kwargs": [["a", 1]]}):
        with pytest.raises(InvalidRequest, match="chat_template"):
            permit(account, **said)
    trusted = JsonBody(b'{"model": "m", "chat_template": "x"}', 100)
    assert trusted.permit(account, 128, templates=True) == 1


def test_no_key_names_the_salt_of_another() -> None:
    other = KeyAccount(ApiKey(name="other", salt=b"", digest=b""))
    salts = [permit(account, cache_salt="a")["cache_salt"] for account in (KEY, other)]
    assert len({*salts, "a"}) == 3 and permit(other, cache_salt=salts[0])["cache_salt"] not in salts
    assert permit(KEY, cache_salt=["a"])["cache_salt"] == permit(KEY, cache_salt="")["cache_salt"]
    assert "cache_salt" not in permit(KEY) and permit(ANONYMOUS, cache_salt="a")["cache_salt"] == "a"


def respond(stream: FakeStream) -> None:
    sent = from_tensors(TensorRequest.parse(stream.body))
    head, raws = part_to_outputs(RelayedPart(sent.body, 200, "application/json"))
    stream.data(b"".join(build_response(head, raws)))
    stream.end()


async def test_each_result_counts_as_a_request_of_the_key(tmp_path: Path) -> None:
    key = make_key()
    (tmp_path / "keys.yaml").write_text(entry_for(key, "team", scopes=[Scope.INFER], limits=Limits(concurrent_requests=2)))
    async with (
        open_frontend(tmp_path / "keys.yaml") as front,
        serve_http(HttpOptions(port=0), front.app) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", headers={"x-api-key": key}, verify=False) as client,
    ):
        front.engine.behaves = [respond]

        async def status(path: str, n: object) -> int:
            return (await client.post(path, json={"model": MEDIA.open, "messages": [], "n": n})).status_code

        for path in ("/v1/images/generations", "/v1/chat/completions"):
            assert [await status(path, n) for n in (None, 1, 2, 3, 129, "2", 1.5)] == [200, 200, 200, 400, 400, 400, 400]
