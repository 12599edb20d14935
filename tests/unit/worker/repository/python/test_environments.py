"""EXECUTION_ENV_PATH: models in a Python environment of their own, packed or not."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import threading
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig, ModelParameter
from dynamo.worker.repository.python.environments import Environments, unpack
from dynamo.worker.repository.stores.content_cache import ContentCache
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x
from tests.support.waiting import WAIT_S

TEXT = X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING')
MODEL = """
import importlib.util, json, os, sys
import numpy as np
import extra
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        seen = {
            "extra": extra.VALUE, "prefix": sys.prefix, "activated": os.environ.get("ACTIVATED"),
            "others": [name for name in ("pytest", "grpc", "orjson") if importlib.util.find_spec(name)],
        }
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([json.dumps(seen)], object))]) for _ in requests]
"""


def in_environment(path: str | Path) -> str:
    return f'{TEXT}parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}\n'


def make_environment(folder: Path) -> Path:
    """Make an environment as conda-pack and venv-pack lay it out: without any link that leads out of it."""
    venv.create(folder, symlinks=False)
    for name in ("python3", f"python{sys.version_info.major}.{sys.version_info.minor}"):
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to("python")
    [packages] = folder.glob("lib/python3.*/site-packages")
    (packages / "extra.py").write_text("VALUE = 41")
    (folder / "bin" / "activate").write_text("export ACTIVATED=yes\n")
    return folder


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as packed:
        for entry in sorted(folder.iterdir()):
            packed.add(entry, entry.name)
    return archive


async def seen_by(repository: Path, name: str) -> dict[str, object]:
    async with opened(repository, name) as models:
        [text] = (await infer(models, name, x(1)))["y"]
    seen: dict[str, object] = json.loads(text)
    return seen


@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_model_runs_in_the_environment_that_it_brings_and_sees_no_package_of_the_worker(
    tmp_path: Path, is_packed: bool
) -> None:
    repository = tmp_path / "models"
    model = python_model(repository, "own", MODEL, in_environment("$$TRITON_MODEL_DIRECTORY/env"))
    if is_packed:
        pack(make_environment(tmp_path / "made"), model / "env")
        shutil.rmtree(tmp_path / "made")
        prefix = tmp_path / "models-copies"
    else:
        prefix = make_environment(model / "env")
    seen = await seen_by(repository, "own")
    assert str(seen.pop("prefix")).startswith(str(prefix))
    assert seen == {"extra": 41, "activated": "yes", "others": []}


async def test_an_archive_is_unpacked_once_for_all_models_and_again_when_it_changes(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    made = make_environment(tmp_path / "made")
    archive = pack(made, tmp_path / "env.tar.gz")
    for name in ("one", "two"):
        python_model(repository, name, MODEL, in_environment(archive))
    first = await seen_by(repository, "one")
    assert (await seen_by(repository, "two"))["prefix"] == first["prefix"]
    [packages] = made.glob("lib/python3.*/site-packages")
    (packages / "extra.py").write_text("VALUE = 42")
    pack(made, archive)
    assert (await seen_by(repository, "one"))["extra"] == 42


def other_python(folder: Path) -> None:
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho cpython 3 8\n")
    python.chmod(0o755)


def broken_python(folder: Path) -> None:
    other_python(folder)
    (folder / "bin" / "python").write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")


def no_python(folder: Path) -> None:
    folder.mkdir()


def no_archive(folder: Path) -> None:
    folder.write_bytes(b"not a tar file")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (other_python, r"it has cpython 3\.8; the worker runs on cpython 3\.\d+ and needs the same"),
        (broken_python, "its bin/python does not run: no such library"),
        (no_python, "it has no bin/python"),
        (no_archive, "the archive cannot be unpacked"),
        (nothing, "there is no such file or folder"),
    ],
)
async def test_an_environment_that_cannot_be_used_is_refused_by_the_name_of_its_field(
    tmp_path: Path, make: Callable[[Path], None], expected: str
) -> None:
    repository = tmp_path / "models"
    make(tmp_path / "env")
    python_model(repository, "own", MODEL, in_environment(tmp_path / "env"))
    with pytest.raises(InvalidRequest, match=rf"^EXECUTION_ENV_PATH '.*env': {expected}"):
        async with opened(repository, "own"):
            pass


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([member("../out")], "not a path inside"),
        ([member("/out")], "not a path inside"),
        ([member("a/../../out")], "not a path inside"),
        ([member("a/b", tarfile.SYMTYPE, ".."), member("a/b/../x/y", tarfile.SYMTYPE, "..")], "not a path inside"),
        ([member("a", tarfile.SYMTYPE, "/etc")], "outside of it"),
        ([member("a", tarfile.SYMTYPE, "../out")], "outside of it"),
        ([member("a", tarfile.SYMTYPE, "."), member("b", tarfile.SYMTYPE, "a/..")], "outside of it"),
        ([member("a", tarfile.SYMTYPE, "b"), member("a/out")], "not a path inside"),
        ([member("a", tarfile.SYMTYPE, "b"), member("a")], "not a path inside"),
        ([member("a", tarfile.SYMTYPE, "b"), member("c", tarfile.LNKTYPE, "a")], "not a path inside"),
        ([member("a", tarfile.LNKTYPE, "../out")], "not a path inside"),
        ([member("a", tarfile.CHRTYPE)], "neither a file nor a folder nor a link"),
    ],
)
def test_nothing_in_an_archive_leads_out_of_it(tmp_path: Path, members: list[tarfile.TarInfo], expected: str) -> None:
    with tarfile.open(tmp_path / "env.tar", "w") as archive:
        for each in members:
            archive.addfile(each)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(InvalidRequest, match=expected):
        unpack(tmp_path / "env.tar", folder, 10**6)
    assert {entry.name for entry in tmp_path.iterdir()} == {"env.tar", "folder"}


def test_an_archive_that_is_larger_than_allowed_or_cut_off_is_refused(tmp_path: Path) -> None:
    large = member("large")
    large.size = 10**6
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.addfile(large, io.BytesIO(os.urandom(large.size)))
    with pytest.raises(InvalidRequest, match=r"more than \d+ files or 999999 bytes"):
        unpack(tmp_path / "env.tar.gz", tmp_path, large.size - 1)
    cut = (tmp_path / "env.tar.gz").read_bytes()[:-1000]
    (tmp_path / "env.tar.gz").write_bytes(cut)
    with pytest.raises(InvalidRequest, match="the archive cannot be unpacked"):
        unpack(tmp_path / "env.tar.gz", tmp_path, 10**7)


def test_an_archive_that_changes_while_it_is_unpacked_does_not_get_into_the_cache(tmp_path: Path) -> None:
    archive = pack(make_environment(tmp_path / "made"), tmp_path / "env.tar.gz")

    class ArchiveChanges(ContentCache):
        @contextmanager
        def open(self, digest: str, make: Callable[[Path], None]) -> Iterator[Path]:
            (tmp_path / "made" / "bin" / "activate").write_text("export ACTIVATED=again\n")
            pack(tmp_path / "made", archive)
            with super().open(digest, make) as entry:
                yield entry

    config = ModelConfig(parameters={"EXECUTION_ENV_PATH": ModelParameter(string_value=str(archive))})
    environments = Environments(ArchiveChanges(tmp_path / "cache", 2**30), 2**30)
    with pytest.raises(InvalidRequest, match="changed while it was unpacked"), environments.open(config, tmp_path):
        pass
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def fill(folder: Path) -> None:
    (folder / "file").write_bytes(bytes(100))


def test_an_entry_is_made_once_while_several_want_it(tmp_path: Path) -> None:
    made = []
    others_wait = threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        assert others_wait.wait(WAIT_S)
        fill(folder)

    def use() -> None:
        with ContentCache(tmp_path / "cache", 1000).open("digest", make) as entry:
            assert (entry / "file").stat().st_size == 100

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    others_wait.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_what_a_process_left_that_died_while_it_made_an_entry_is_not_taken_for_one(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path, 1000)

    def die(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.open("digest", die):
        pass
    (tmp_path / "digest.partial").mkdir()
    (tmp_path / "digest.partial" / "half").touch()
    with cache.open("digest", fill) as entry:
        assert [file.name for file in entry.iterdir()] == ["file"]


def test_the_least_recently_used_entry_that_is_not_in_use_makes_room(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path, 250)
    with cache.open("used", fill) as used:
        for name in ("old", "new", "newest"):
            with cache.open(name, fill):
                pass
        assert used.exists()
    assert not (tmp_path / "old").exists() and not (tmp_path / "new").exists() and (tmp_path / "newest").exists()


def test_a_cache_into_which_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidRequest, match="must belong to this user"), ContentCache(tmp_path, 1000).open("digest", fill):
        pass
