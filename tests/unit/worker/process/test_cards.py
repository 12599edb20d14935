"""How a worker completes the cards of its engines."""

import logging
from hashlib import sha256
from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.output_formats import NONE, REASONING_FORMATS, TOOL_FORMATS
from dynamo.worker.config import TextOptions
from dynamo.worker.process.cards import CardFinisher
from dynamo.worker.process.parsers import choose_parsers

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "tool_parser", "reasoning_parser"),
    [
        ("", "generic", ""),
        ("{#- tools are written as <tool_call> #}", "generic", ""),
        (f"{TOOLS} <<call>>", "generic", ""),
        (f"{TOOLS}<tool_call>{{}}</tool_call>", "hermes", ""),
        (f"{TOOLS}<tool_call>{{}}</tool_call>{{% if enable_thinking is false %}}<think></think>{{% endif %}}", "hermes", "qwen3"),
        (f"{TOOLS}<tool_call><function=f><parameter=p>", "qwen3_coder", ""),
        (f"{TOOLS}<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call><think></think>", "glm45", "glm45"),
        (f"{TOOLS}<|python_tag|>", "llama3_json", ""),
        (f"{TOOLS}[func_name1(params_name1=params_value1)]", "pythonic", ""),
        (f"{TOOLS}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", ""),
        (f"{TOOLS}[AVAILABLE_TOOLS][TOOL_CALLS][THINK][/THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>```json", "deepseek_v3", ""),
        ("<｜tool▁calls▁begin｜>f<｜tool▁sep｜><think></think>", "deepseek_v31", "deepseek_v3"),
        (f"{TOOLS}{{% set mark = '｜DSML｜' %}}<{{{{ mark }}}}function_calls>", "deepseek_v32", ""),
        (f"tool_declare{TOOLS}", "kimi_k2", ""),
        (f"List of tools: {TOOLS}<|tool_call_start|>", "pythonic", ""),
        ("{{ message.content.split('</think>')[-1] }}", "generic", "deepseek_r1"),
        (f"{TOOLS}<|tool_calls_section_begin|><think></think>", "kimi_k2", "kimi_k2"),
        (f"{TOOLS}<minimax:tool_call><invoke name='f'><think></think>", "minimax_m2", "minimax_m2"),
        (f"{TOOLS}<|tool_call|>", "granite", ""),
        (f"{TOOLS}<|tool_call|>Write your thoughts after 'Here is my thought process:'", "granite", "granite"),
        (f"{TOOLS}<|tool|><|/tool|><|tool_call|><|/tool_call|>", "phi4_mini_json", ""),
        (f"{TOOLS}<TOOLCALL>[]</TOOLCALL><think></think>", "nemotron", "nemotron"),
        (f"{TOOLS}<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        (f"{TOOLS}<seed:tool_call><function=f><seed:think>", "seed_oss", "seed_oss"),
    ],
)
def test_parsers_are_detected_by_what_the_template_writes(written: str, tool_parser: str, reasoning_parser: str) -> None:
    chosen = choose_parsers(PLAIN + written)
    assert (chosen.tool_parser, chosen.reasoning_parser) == (tool_parser, reasoning_parser)
    assert chosen.tool_parser in {form.name for form in TOOL_FORMATS}
    assert chosen.reasoning_parser in {form.name for form in REASONING_FORMATS} | {""}


def card(template: bytes = PLAIN.encode(), **llm: str) -> ModelCard:
    digest = sha256(template).hexdigest() if template else ""
    return ModelCard(
        name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=64, tokenizer=digest_of(b"t"), chat_template=digest, **llm)
    )


def digest_of(data: bytes) -> str:
    return sha256(data).hexdigest()


def test_what_was_chosen_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dynamo.worker.process.cards"):
        finished = CardFinisher(TextOptions()).finish(card(), [b"t", PLAIN.encode()])
    assert finished.card.llm is not None
    assert (finished.card.llm.tool_parser, finished.card.llm.reasoning_parser) == ("generic", "")
    assert [record.getMessage() for record in caplog.records] == [
        "model m: tool parser generic, reasoning parser none (the chat template has no tools in a format that is supported)"
    ]


def test_the_operator_overrides_the_engine_and_the_engine_the_template() -> None:
    of_engine = CardFinisher(TextOptions()).finish(card(tool_parser="mistral"), [PLAIN.encode()]).card.llm
    configured = TextOptions(tool_parser="hermes", reasoning_parser="qwen3")
    of_operator = CardFinisher(configured).finish(card(tool_parser="mistral"), [PLAIN.encode()]).card.llm
    off = CardFinisher(TextOptions(tool_parser=NONE, reasoning_parser=NONE)).finish(card(tool_parser="mistral"), []).card.llm
    assert of_engine is not None and of_operator is not None and off is not None
    assert of_engine.tool_parser == "mistral"
    assert (of_operator.tool_parser, of_operator.reasoning_parser) == ("hermes", "qwen3")
    assert (off.tool_parser, off.reasoning_parser) == ("", "")


def test_the_configured_chat_template_replaces_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(f"{TOOLS}<tool_call>")
    finished = CardFinisher(TextOptions(chat_template=file)).finish(card(), [b"t", PLAIN.encode()])
    assert finished.card.llm is not None
    assert list(finished.files) == [b"t", file.read_bytes()]
    assert finished.card.llm.chat_template == digest_of(file.read_bytes())
    assert finished.card.llm.tool_parser == "hermes"


def test_a_chat_template_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nothing\.jinja cannot be read"):
        CardFinisher(TextOptions(chat_template=tmp_path / "nothing.jinja"))


def test_a_tensor_model_gets_its_aliases_and_nothing_else() -> None:
    tensor = ModelCard(name="m", kind=ModelKind.TENSOR)
    assert CardFinisher(TextOptions(), ["n"]).finish(tensor, ()).card == ModelCard(
        name="m", kind=ModelKind.TENSOR, aliases=("n",)
    )


def test_a_model_without_a_chat_template_has_no_parsers() -> None:
    plain = card(template=b"")
    assert CardFinisher(TextOptions()).finish(plain, ()).card == plain
