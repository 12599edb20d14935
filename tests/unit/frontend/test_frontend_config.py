from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.model_card import ModelKind
from dynamo.common.security.tls import TlsFiles
from dynamo.frontend.config import FrontendConfig, OverloadStatus, RouterMode

SAMPLE = """
grpc_service:
  host: "0.0.0.0"
  port: 8787
  http_metrics_host: "0.0.0.0"
  http_metrics_port: 8788
models:
  - name: "tensor_model"
    type: "TensorBased"
    inputs:
      - {name: "input", datatype: "FP32", shape: [1, 1024]}
    outputs:
      - {name: "output", datatype: "FP32", shape: [1, 512]}
prometheus:
  enabled: true
  endpoint: "http://prometheus:9090"
  scrape_interval: "15s"
grafana:
  dashboard:
    name: "Metrics"
    datasources:
      - prometheus
"""


def read(*flags: str, **environ: str) -> FrontendConfig:
    return load(FrontendConfig, flags, environ, program="dynamo-frontend")


def from_file(tmp_path: Path, text: str) -> FrontendConfig:
    file = tmp_path / "frontend.yaml"
    file.write_text(text)
    return read("--config", str(file))


def test_without_anything_it_serves_http_on_this_machine_only() -> None:
    config = read()
    assert not config.grpc.wanted
    assert (config.http.host, config.http.port) == ("127.0.0.1", 8000)
    assert (config.grpc.host, config.grpc.listen_port) == ("127.0.0.1", 8001)
    assert config == FrontendConfig()


@pytest.mark.parametrize("flag", ["--grpc", "--kserve-grpc-server", "--kserve-mode"])
def test_the_flags_of_the_field_turn_grpc_on(flag: str) -> None:
    assert read(flag).grpc.wanted


@pytest.mark.parametrize("name", ["DYN_GRPC", "DYN_KSERVE_GRPC_SERVER"])
def test_so_do_the_variables(name: str) -> None:
    assert read(**{name: "1"}).grpc.wanted


@pytest.mark.parametrize("port", ["0", "8001", "9001"])
def test_who_names_a_port_of_grpc_wants_grpc(tmp_path: Path, port: str) -> None:
    by_flag, *others = [
        read("--grpc-port", port),
        read(DYN_GRPC_PORT=port),
        read(DYNAMO_GRPC_PORT=port),
        from_file(tmp_path, f"grpc: {{port: {port}}}"),
    ]
    assert by_flag.grpc.wanted and by_flag.grpc.listen_port == int(port)
    assert all(other == by_flag for other in others)


def test_a_port_of_grpc_gets_the_certificate_that_is_for_all(tmp_path: Path) -> None:
    config = read("--grpc-port", "8001", "--use-tls", "--cert-file", "c", "--key-file", "k")
    assert config.grpc.wanted
    assert config.grpc.tls == config.http.tls == TlsFiles(cert="c", key="k", client_ca=None)


def test_a_plain_no_goes_before_what_asks_for_grpc(tmp_path: Path) -> None:
    assert not read("--no-grpc", "--grpc-port", "9001").grpc.wanted
    assert not read("--no-grpc", DYN_GRPC_PORT="9001").grpc.wanted
    assert not from_file(tmp_path, f"{SAMPLE}\ngrpc: {{enabled: false}}").grpc.wanted


@pytest.mark.parametrize("prefix", ["DYNAMO_", "DYN_"])
def test_both_prefixes_name_the_grpc_settings(prefix: str) -> None:
    environ = {"GRPC_PORT": "9001", "GRPC_WORKERS": "7", "MAX_MESSAGE_SIZE": "4194304"}
    grpc = read(**{prefix + name: value for name, value in environ.items()}).grpc
    assert (grpc.port, grpc.workers, grpc.max_message_bytes) == (9001, 7, 4 * 2**20)


def test_the_flags_of_the_source_documents_work_together() -> None:
    config = read(
        *("--grpc-port", "8001", "--grpc-workers", "4", "--kserve-mode", "--max-message-size", "4194304"),
        *("--router-mode", "random", "--http-port", "8080", "--overload-status", "529"),
    )
    assert config.grpc.wanted
    assert config.grpc.max_message_bytes == 4194304
    assert config.router.mode is RouterMode.RANDOM
    assert config.overload_status is OverloadStatus.OVERLOADED


def test_http2_windows_have_their_variables() -> None:
    grpc = read(DYN_GRPC_INITIAL_CONNECTION_WINDOW_SIZE="16MiB", DYN_GRPC_INITIAL_STREAM_WINDOW_SIZE="1048576").grpc
    assert (grpc.initial_connection_window_size, grpc.initial_stream_window_size) == (16 * 2**20, 2**20)


def test_sections_about_monitoring_take_effect(tmp_path: Path) -> None:
    config = from_file(tmp_path, f"{SAMPLE}\ncache_dir: {tmp_path}")
    assert config.prometheus.endpoint == "http://prometheus:9090"
    assert (config.grafana.dashboard_name, config.grafana.datasources) == ("Metrics", ("prometheus",))
    assert config.grafana_folder == tmp_path / "grafana"
    assert read("--grafana-folder", "boards").grafana_folder == Path("boards")
    assert read().grafana_folder is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prometheus: {endpoint: prometheus}", "is not a URL that begins with http:// or https://"),
        ("prometheus: {scrape_interval: often}", "is not an interval such as 15s"),
        ("prometheus: {ports: 1}", "unknown key 'prometheus.ports'"),
        ("grafana: {dashboard: {datasources: ['a|b']}}", "is not a name"),
        ("prometheus: {port: 9, enabled: false}", "--prometheus-port and --no-prometheus exclude each other"),
        ("{prometheus: {port: 0}, http: {port: 1}, processes: 2}", "a fixed --prometheus-port"),
    ],
)
def test_what_is_wrong_in_them_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        from_file(tmp_path, text)


def test_the_sample_file_of_the_field_is_valid(tmp_path: Path) -> None:
    config = from_file(tmp_path, SAMPLE)
    assert config.grpc.wanted
    assert (config.grpc.host, config.grpc.port) == ("0.0.0.0", 8787)
    assert (config.http.host, config.http.port) == ("0.0.0.0", 8788)
    (card,) = config.serving.models
    assert (card.name, card.kind) == ("tensor_model", ModelKind.TENSOR)
    assert card.inputs[0].shape == (1, 1024)
    assert card.outputs[0].datatype == "FP32"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpc_service: {prot: 1}", "prot"),
        ("grpc_service: 3", "gRPC service"),
        ("grpc_service: {port: 70000}", "70000"),
        ("models: {name: x}", "list of models"),
        ("models: [{type: TensorBased}]", "name"),
        ("models: [{name: x, type: Chat}]", "type 'Chat'"),
        ("models: [{name: x, inputs: [{name: a, datatype: FP32}]}]", "shape"),
        (
            "models: [{name: x, inputs: [{name: a, datatype: FP32, shape: [1]}, {name: a, datatype: FP32, shape: [1]}]}]",
            "two tensors",
        ),
        ("models: [{name: x}, {name: x}]", "twice"),
        ("models: [{name: 'x y'}]", "' '"),
        ("modles: []", "models"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_file(tmp_path, text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grpc-tls-cert-file", "x"], "--grpc-tls-key-file"),
        (["--grpc-tls-client-ca-file", "x"], "needs --grpc-tls-cert-file"),
        (["--processes", "2", "--http-port", "0"], "--processes"),
        (["--processes", "2", "--grpc", "--grpc-port", "0"], "--processes"),
        (["--grpc", "--grpc-port", "8000"], "both 8000"),
        (["--router-mode", "best"], "'best'"),
        (["--grpc-server", "rust"], "'rust'"),
        (["--max-message-size", "64 parsecs"], "64 parsecs"),
        (["--max-message-size", "10"], "below"),
    ],
)
def test_flags_that_contradict_each_other_stop_the_start(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(*flags)


def test_objectives_of_the_endpoint_picker_are_names_with_priorities() -> None:
    flags = ("--endpoint-picker-objective", "batch=-10", "--endpoint-picker-objective=a=b=3")
    assert read("--endpoint-picker", *flags).endpoint_picker.objectives == (("batch", -10), ("a=b", 3))
    for wrong in ("batch", "=1", "batch=", "batch=1.5", "batch=99999999999"):
        with pytest.raises(ConfigError, match="NAME=PRIORITY"):
            read("--endpoint-picker-objective", wrong)


def test_the_endpoint_picker_gets_the_certificate_that_is_for_all_unless_it_has_its_own() -> None:
    common = ("--cert-file", "c", "--key-file", "k")
    assert read("--endpoint-picker", *common).picker_grpc.tls == TlsFiles(cert="c", key="k")
    own = (
        "--endpoint-picker-tls-cert-file",
        "d",
        "--endpoint-picker-tls-key-file",
        "l",
        "--endpoint-picker-tls-client-ca-file",
        "a",
    )
    options = read("--endpoint-picker", "--endpoint-picker-port", "7000", *common, *own).picker_grpc
    assert (options.tls, options.listen_port) == (TlsFiles(cert="d", key="l", client_ca="a"), 7000)
    with pytest.raises(ConfigError, match="a fixed --endpoint-picker-port"):
        read("--endpoint-picker", "--endpoint-picker-port", "0", "--processes", "2", "--http-port", "8000")
