"""gRPC clients in Go and Java, built from this project's protos with the libraries that Debian packages."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"

GO = shutil.which("go")
GO_LIBRARIES = Path("/usr/share/gocode")
"""Where Debian's golang-google-grpc-dev puts its sources."""
HAS_GO_GRPC = bool(
    GO
    and (GO_LIBRARIES / "src/google.golang.org/grpc").exists()
    and shutil.which("protoc")
    and shutil.which("protoc-gen-go-grpc")
)

JAVA_PLUGIN = shutil.which("grpc_java_plugin")
JARS = [
    Path("/usr/share/java") / f"{name}.jar"
    for name in (
        *("grpc-api", "grpc-context", "grpc-core", "grpc-netty", "grpc-protobuf", "grpc-protobuf-lite", "grpc-stub"),
        *("netty-buffer", "netty-codec", "netty-codec-http", "netty-codec-http2", "netty-codec-socks", "netty-common"),
        *("netty-handler", "netty-handler-proxy", "netty-resolver", "netty-transport", "netty-transport-native-unix-common"),
        *("geronimo-annotation-1.3-spec", "guava", "opencensus-api", "perfmark-api", "protobuf"),
    )
]
"""Files of Debian's libgrpc-java, libgeronimo-annotation-1.3-spec-java, libguava-java, libnetty-java, libperfmark-java and
libprotobuf-java. Debian's netty knows no ALPN, so that the client in Java has no TLS.
"""
HAS_JAVA_GRPC = bool(JAVA_PLUGIN and shutil.which("protoc") and shutil.which("javac") and all(jar.exists() for jar in JARS))


async def run(*command: str, folder: Path | None = None, env: dict[str, str] | None = None) -> tuple[int | None, str, str]:
    """Return the exit status, the output and the errors."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, env=env, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def build_go_client(source: Path, folder: Path, cache: Path) -> str:
    """Build a client over gRPC in `folder`, with Debian's libraries instead of modules; return its path."""
    package = folder / "src/example.org/dynamo-grpc-client"
    package.mkdir(parents=True)
    shutil.copy(source, package)
    status, _, errors = await run(str(ROOT / "examples/clients/go-grpc/make-stubs.sh"), str(package))
    assert status == 0, errors
    env = {**os.environ, "GOPATH": f"{folder}:{GO_LIBRARIES}", "GO111MODULE": "off", "GOCACHE": str(cache)}
    client = str(folder / "client")
    status, _, errors = await run(str(GO), "build", "-o", client, ".", folder=package, env=env)
    assert status == 0, errors
    return client


async def build_java_client(source: Path, folder: Path) -> list[str]:
    """Build a client over gRPC in `folder`; return the command that runs it."""
    stubs, classes = folder / "stubs", folder / "classes"
    stubs.mkdir()
    make = ("protoc", f"--plugin=protoc-gen-grpc-java={JAVA_PLUGIN}", f"--java_out={stubs}", f"--grpc-java_out={stubs}")
    status, _, errors = await run(*make, "dynamo/protos/inference.proto", "dynamo/protos/model_config.proto", folder=PROTOS)
    assert status == 0, errors
    path = ":".join(map(str, JARS))
    sources = (str(source), *map(str, stubs.rglob("*.java")))
    status, _, errors = await run("javac", "-proc:none", "-encoding", "UTF-8", "-d", str(classes), "-cp", path, *sources)
    assert status == 0, errors
    return ["java", "-cp", f"{classes}:{path}", source.stem]
