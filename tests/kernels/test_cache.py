"""The cache of compiled kernels: processes that compile at the same time leave it whole, and code
from it computes what it computed when it was compiled.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import caching

from configs.paths import SOURCE_ROOT
from kernels.cpu import cache
from kernels.cpu.cache import FilePerSignature
from kernels.cpu.jit import exact_entry_jit

PRODUCT = """
import torch
from kernels.interface import GroupedCodes
from kernels.reference.grouped import pack_codes, quantize_groups
from kernels.select import select_backend

torch.manual_seed(0)
codes, zeros, scale = quantize_groups(torch.randn(192, 256), 64)
weight = GroupedCodes(words=pack_codes(codes), zeros=zeros, scale=scale, num_rows=192)
int4 = select_backend("cpu", "cpu").quantized["int4"]
print(int4.linear(torch.randn(1, 256), int4.pack_weight(weight), None).tolist())
"""
STAMP = "version"
# When a process of the two writes its first and its second file: the second process writes the
# index last and the data first, as happens when something else has the core of the first.
WRITES_AT_S = {"first": (0.0, 0.3), "second": (0.1, 0.2)}


def cache_file(folder: Path, stamp: str = STAMP) -> Any:
    """What a process has of the cache of a function."""
    return FilePerSignature(str(folder), "function", stamp)


def test_two_processes_that_save_different_signatures_at_once_keep_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With numba's index, both call their code the first, and one finds that of the other."""
    is_about_to_write = threading.Barrier(2, timeout=20)
    num_writes = dict.fromkeys(WRITES_AT_S, 0)
    write = FilePerSignature._open_for_write

    def write_in_turn(self: Any, path: str) -> Any:
        name = threading.current_thread().name
        is_first = num_writes[name] == 0
        if is_first:
            is_about_to_write.wait()
        at_s = WRITES_AT_S[name]
        time.sleep(at_s[0] if is_first else at_s[1] - at_s[0])
        num_writes[name] += 1
        return write(self, path)

    monkeypatch.setattr(FilePerSignature, "_open_for_write", write_in_turn)
    threads = [
        threading.Thread(
            target=cache_file(tmp_path).save, args=(name, f"code of {name}"), name=name
        )
        for name in WRITES_AT_S
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {name: cache_file(tmp_path).load(name) for name in WRITES_AT_S}
    assert found == {name: f"code of {name}" for name in WRITES_AT_S}


def test_code_of_another_version_is_not_found(tmp_path: Path) -> None:
    cache_file(tmp_path).save("signature", "code")
    assert cache_file(tmp_path).load("signature") == "code"
    assert cache_file(tmp_path, "another").load("signature") is None
    assert cache_file(tmp_path).load("another") is None


class LooksAlike:
    """A type whose name does not tell it from another."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LooksAlike) and self.number == other.number

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "a type"


def test_constants_of_other_files_are_part_of_the_version() -> None:
    """Compiled functions hold the values of the constants that they name."""
    files = set()
    compiled = SOURCE_ROOT / "workers" / "parallel" / "advance.py"
    for path in (*Path(cache.__file__).parent.glob("*.py"), compiled):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and str(node.module).startswith("kernels.")
                and any(alias.name.isupper() for alias in node.names)
            ):
                files.add(SOURCE_ROOT / f"{str(node.module).replace('.', '/')}.py")
    assert len(files) > 2 and files <= set(cache._SHARED_SOURCES)


def test_code_for_a_type_of_the_same_name_is_not_found(tmp_path: Path) -> None:
    cache_file(tmp_path).save(LooksAlike(1), "code")
    assert cache_file(tmp_path).load(LooksAlike(1)) == "code"
    assert cache_file(tmp_path).load(LooksAlike(2)) is None


@pytest.mark.parametrize("content", [b"", b"\x80\x04"], ids=["empty", "cut off"])
def test_a_damaged_file_is_replaced(content: bytes, tmp_path: Path) -> None:
    cache_file(tmp_path).save("signature", "code")
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    assert cache_file(tmp_path).load("signature") is None
    cache_file(tmp_path).save("signature", "code")
    assert cache_file(tmp_path).load("signature") == "code"


def test_a_folder_that_is_gone_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = cache_file(tmp_path / "gone")
    file.save("signature", "code")
    assert file.load("signature") is None
    assert "compiled kernels cannot be kept" in caplog.text


def test_functions_of_others_are_cached_as_numba_does_it(tmp_path: Path) -> None:
    file = caching.IndexDataCacheFile(
        cache_path=str(tmp_path), filename_base="function", source_stamp=STAMP
    )
    assert not isinstance(file, FilePerSignature)


def size_of_elements(x: Any) -> int:
    return x.itemsize  # type: ignore[no-any-return]


def test_every_signature_is_compiled_once_and_then_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kernels.cpu.cache._CHECKOUT_DIR", Path(__file__).resolve().parent)
    arrays = {4: np.zeros(1, np.float32), 8: np.zeros((2, 3))}
    for count in ("cache_misses", "cache_hits"):
        compiled = exact_entry_jit(size_of_elements)
        for size, array in arrays.items():
            assert compiled(array) == size
        assert sum(getattr(compiled.stats, count).values()) == len(arrays)


def test_code_from_the_cache_gives_the_bits_of_the_process_that_compiled_it(
    tmp_path: Path,
) -> None:
    """A rank that replaces another may have loaded what the other compiled."""
    answers = [
        subprocess.run(
            [sys.executable, "-c", PRODUCT],
            cwd=SOURCE_ROOT,
            env=os.environ | {"EAGLERAY_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert answers[0] and answers[0] == answers[1]
