"""Python environments of models: `EXECUTION_ENV_PATH`, a folder or an archive as conda-pack makes them.

An archive is unpacked once per content. What runs in the environment is `stub.launcher`; the environment needs the minor version
of this Python, since msgspec, and numpy if the environment has none, are this worker's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import posixpath
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path

import dynamo
from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stub import launcher as stub_launcher

FIELD = "EXECUTION_ENV_PATH"
_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_MAX_MEMBERS = 300_000
_PROBE_S = 60.0
_PROBE = "import sys; print(sys.implementation.name, *sys.version_info[:2])"
_SHARED_PACKAGES = ("msgspec", "numpy")
_ACTIVATE = 'source "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True)
class Interpreter:
    """How the process of a model is started: `command`, followed by the arguments of `stub`."""

    command: tuple[str, ...]
    variables: Mapping[str, str] | None = None
    """The environment variables of the process; None: those of the worker."""


OWN = Interpreter((sys.executable, "-P", "-m", "dynamo.worker.repository.stub.process"))
"""The worker's own Python."""


class Environments:
    def __init__(self, cache: ContentCache, max_bytes: int) -> None:
        """`max_bytes`: of one environment, unpacked."""
        self._cache = cache
        self._max_bytes = max_bytes
        self._digests: dict[Path, tuple[tuple[int, int], str]] = {}
        """By archive: its modification time and size, and the digest that it had then."""

    @contextmanager
    def open(self, config: ModelConfig, folder: Path) -> Iterator[Interpreter]:
        """Yield the Python that the model in `folder` names, which is there until the end of the body. Blocks.

        Raises InvalidRequest, naming the field.
        """
        if FIELD not in config.parameters:
            yield OWN
            return
        text = config.parameters[FIELD].string_value
        path = Path(text.replace(_MODEL_FOLDER, str(folder)))
        with ExitStack() as stack:
            try:
                if not text:
                    raise InvalidRequest("it is empty")
                if "\0" in text or not path.exists():
                    raise InvalidRequest("there is no such file or folder")
                root = path.resolve() if path.is_dir() else stack.enter_context(self._unpacked(path))
                interpreter = _interpreter(root)
            except (InvalidRequest, OSError) as error:
                raise InvalidRequest(f"{FIELD} '{text[:200]}': {error}") from error
            yield interpreter

    @contextmanager
    def _unpacked(self, archive: Path) -> Iterator[Path]:
        digest = self._digest(archive)

        def make(folder: Path) -> None:
            unpack(archive, folder, self._max_bytes)
            if self._digest(archive) != digest:  # what was unpacked must not go by the digest of something else
                raise InvalidRequest("the archive changed while it was unpacked: load the model again")

        with self._cache.open(f"environment-{digest}", make) as root:
            yield root

    def _digest(self, archive: Path) -> str:
        with open(archive, "rb") as file:
            status = os.stat(file.fileno())
            form = (status.st_mtime_ns, status.st_size)
            former_form, digest = self._digests.get(archive, (None, ""))
            if form != former_form:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                self._digests[archive] = (form, digest)
        return digest


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Unpack a tar archive into `folder`. Raises InvalidRequest if it is too large, or leads out of the folder, or is none."""
    links: set[str] = set()
    total = 0
    try:
        with tarfile.open(archive, "r|*") as members:
            for count, member in enumerate(members, 1):
                name = _checked_name(member, links)
                total += member.size
                if count > _MAX_MEMBERS or total > max_bytes or member.size < 0:
                    raise InvalidRequest(f"the archive holds more than {_MAX_MEMBERS} files or {max_bytes} bytes")
                if name != ".":
                    members.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError, zlib.error, LZMAError, OSError, ValueError) as error:
        raise InvalidRequest(f"the archive cannot be unpacked: {str(error)[:200]}") from error


def _checked_name(member: tarfile.TarInfo, links: set[str]) -> str:
    """Return the path of a member, and add it to `links` if it is one. Raises InvalidRequest unless it stays in the archive.

    Nothing is written through a link, and links lead to no place outside: they go up at their beginning only, where `..` is what
    it seems to be. Names have no `..` at all.
    """
    name = _checked_path(member.name, links)
    if member.islnk():
        _checked_path(member.linkname, links)
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise InvalidRequest(f"the archive's '{member.name[:200]}' is neither a file nor a folder nor a link")
    if member.issym():
        steps = member.linkname.split("/")
        up = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
        if member.linkname.startswith("/") or ".." in steps[up:] or up > name.count("/"):
            raise InvalidRequest(f"the archive's '{member.name[:200]}' is a link to '{member.linkname[:200]}', outside of it")
        links.add(name)
    return name


def _checked_path(text: str, links: set[str]) -> str:
    name = posixpath.normpath(text)
    parts = name.split("/")
    above = {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    if name.startswith("/") or ".." in text.split("/") or above & links:
        raise InvalidRequest(f"the archive's '{text[:200]}' is not a path inside of it")
    return name


def _interpreter(root: Path) -> Interpreter:
    """Return the Python in an unpacked environment. Raises InvalidRequest if there is none that fits, OSError."""
    python = next((root / "bin" / name for name in ("python", "python3") if os.access(root / "bin" / name, os.X_OK)), None)
    if python is None:
        raise InvalidRequest("it has no bin/python that can be run")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    libraries = variables.get("LD_LIBRARY_PATH")
    variables |= {
        "PATH": f"{root / 'bin'}:{variables.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": f"{root / 'lib'}:{libraries}" if libraries else str(root / "lib"),
    }
    _check_version(python, variables)
    activate = root / "bin" / "activate"  # sets what packages of the environment need, such as paths of their data
    bash = shutil.which("bash")
    prefix = (bash, "-c", _ACTIVATE, "activate", str(activate)) if activate.is_file() and bash else ()
    command = (*prefix, str(python), "-P", "-s", stub_launcher.__file__, json.dumps(_packages()))
    return Interpreter(command, variables)


def _check_version(python: Path, variables: Mapping[str, str]) -> None:
    own = [sys.implementation.name, *map(str, sys.version_info[:2])]
    try:
        probe = subprocess.run(  # noqa: S603
            [python, "-I", "-c", _PROBE], env=variables, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InvalidRequest("its bin/python does not start in time") from None
    given = probe.stdout.split()
    if probe.returncode or len(given) != len(own):
        last = (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]
        raise InvalidRequest(f"its bin/python does not run: {last[:200]}")
    if given != own:
        raise InvalidRequest(
            f"it has {given[0]} {given[1]}.{given[2]}; the worker runs on {own[0]} {own[1]}.{own[2]} and needs the same"
        )


def _packages() -> dict[str, list[str]]:
    """Return where `stub.launcher` finds the packages that are not the environment's."""
    places = {"dynamo": [os.path.abspath(place) for place in dynamo.__path__]}
    for name in _SHARED_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            places[name] = [str(Path(spec.origin).parent.parent)]
    return places
