"""Triton's own Python client examples, unmodified, against a real Triton and this project.

    python -m tests.differential.examples --triton PATH --examples FOLDER

FOLDER is `src/python/examples` of Triton's client repository. Prints a table; exits with 1 if an example runs there and not here.
They run with this Python, or that of --python, which needs `tritonclient[all]`, Pillow, `attrdict3` and `six`. One example has
its ports written into it, so 8000 and 8001 have to be free.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from PIL import Image

from benchmarks.tritonserver import add_triton_flag, packages_of
from tests.differential.example_models import write_eight_models, write_other_models, write_seven_models
from tests.differential.servers import Server, here, triton
from tests.support.waiting import WAIT_S, expiring

TIMEOUT_S = WAIT_S
FIXED_HTTP, FIXED_GRPC = 8000, 8001
RUNS = "runs"
IMAGE = "IMAGE"
"""Stands for the path of a picture among the arguments of an example."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an example."""

    script: str
    flags: tuple[str, ...] = ()
    http: bool = False
    """Whether it talks HTTP: the port that its URL gets."""
    url: bool = True
    """Whether it takes a URL."""

    @property
    def title(self) -> str:
        return " ".join((self.script, *(flag for flag in self.flags if flag != IMAGE)))


def _simple(script: str) -> list[Run]:
    run = partial(Run, script, http="_http_" in script)
    return [run(), run(("-d",))] if "_sequence_" in script else [run()]


def _image(script: str, *flags: str) -> list[Run]:
    if script == "grpc_image_client.py":
        return [Run(script, (*flags, *more, IMAGE)) for more in ((), ("-a",), ("--streaming",))]
    return [Run(script, (*flags, "-i", protocol, IMAGE), http=protocol == "HTTP") for protocol in ("HTTP", "gRPC")]


_MODEL = ("-m", "inception", "-c", "2", "-s", "INCEPTION", "-b", "2")
_OTHER = {
    "ensemble_image_client.py": _image("ensemble_image_client.py", "-c", "2"),
    "grpc_client.py": [Run("grpc_client.py")],
    "grpc_image_client.py": _image("grpc_image_client.py", *_MODEL),
    "image_client.py": _image("image_client.py", *_MODEL) + _image("image_client.py", "-m", "densenet_onnx", "-a"),
    "memory_growth_test.py": [Run("memory_growth_test.py", ("-i", protocol), url=False) for protocol in ("HTTP", "gRPC")],
}
"""The examples that need other models than the eight."""


def runs_of(script: str) -> Sequence[Run]:
    """Return how to run an example, with each of the protocols that it knows."""
    if script == "reuse_infer_objects_client.py":
        return [Run(script, ("-i", protocol), http=protocol == "HTTP") for protocol in ("HTTP", "gRPC")]
    return _OTHER[script] if script in _OTHER else _simple(script)


def _repository_of(script: str) -> Callable[[Path], list[str]]:
    """Return what writes the models that an example expects."""
    if script == "simple_http_model_control.py":
        return write_seven_models
    return write_other_models if script in _OTHER else write_eight_models


async def main(arguments: argparse.Namespace) -> int:
    scripts = sorted(path.name for path in arguments.examples.glob("*.py") if fnmatchcase(path.name, arguments.example))
    results: dict[Run, list[str]] = {run: [] for script in scripts for run in runs_of(script)}
    with tempfile.TemporaryDirectory(prefix="examples-") as folder:
        picture = Path(folder) / "picture.png"
        Image.linear_gradient("L").convert("RGB").save(picture)
        for write in dict.fromkeys(map(_repository_of, scripts)):
            repository = Path(folder) / write.__name__
            models = write(repository)
            runs = [run for run in results if _repository_of(run.script) is write]
            runs.sort(key=lambda run: "model_control" in run.script)  # it leaves a model unloaded that others need
            for start in (partial(triton, arguments.packages, repository, models), partial(here, repository, models)):
                for run, outcome in await _outcomes(start, arguments, runs, picture):
                    results[run].append(outcome)
    for run, (there, ours) in results.items():
        print(f"{run.title:70} Triton: {there}; here: {ours}")
    if all(there != RUNS for there, _ in results.values()):
        print("no example runs with Triton: nothing was compared")
        return 1
    return int(any(there == RUNS != ours for there, ours in results.values()))


async def _outcomes(
    start: Callable[[], AbstractAsyncContextManager[Server]], arguments: argparse.Namespace, runs: Sequence[Run], picture: Path
) -> list[tuple[Run, str]]:
    """Run examples one after the other, with a new server after each that ends one."""
    outcomes: list[tuple[Run, str]] = []
    while len(outcomes) < len(runs):
        async with start() as server, _relay(FIXED_HTTP, server.http), _relay(FIXED_GRPC, server.grpc):
            for run in runs[len(outcomes) :]:
                url = ("-u", f"127.0.0.1:{server.http if run.http else server.grpc}") if run.url else ()
                flags = [str(picture) if flag == IMAGE else flag for flag in run.flags]
                outcome = await _outcome([arguments.python, str(arguments.examples / run.script), *url, *flags])
                if outcome != RUNS and await server.has_ended(expiring(1)):
                    outcomes.append((run, "ends the server"))
                    break
                outcomes.append((run, outcome))
    return outcomes


async def _outcome(command: Sequence[str]) -> str:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), TIMEOUT_S)
    except TimeoutError:
        child.kill()
        await child.wait()
        return f"no end within {TIMEOUT_S} s"
    if child.returncode == 0:
        return RUNS
    lines = output.decode().strip().splitlines()
    return f"{child.returncode}: {lines[-1] if lines else ''}"


@asynccontextmanager
async def _relay(port: int, target: int) -> AsyncIterator[None]:
    """Pass connections to a port of this machine on to another one."""

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))

    server = await asyncio.start_server(passed_on, "localhost", port)
    async with server:
        yield


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential.examples", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_triton_flag(parser)
    parser.add_argument("--examples", metavar="FOLDER", type=Path, required=True, help="src/python/examples of the repository")
    parser.add_argument("--example", metavar="PATTERN", default="*", help="run only the examples whose file names match")
    parser.add_argument("--python", metavar="FILE", default=sys.executable, help="the Python that runs the examples")
    arguments = parser.parse_args()
    arguments.packages = packages_of(parser, arguments.triton)
    return arguments


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
