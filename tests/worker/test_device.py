"""What workers are told about their machine, and what they find out."""

import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from common.errors import ConfigError
from worker import device

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def child(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@linux
def test_the_environment_sets_threads_and_a_private_kernel_folder(tmp_path: Path) -> None:
    made = device.cpu_environment(3, tmp_path / "home")
    assert made["OPENBLAS_NUM_THREADS"] == made["OMP_NUM_THREADS"] == "3"
    folder = Path(made["TMPDIR"])
    assert folder.parent == tmp_path / "home" / "kernels" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert device.cpu_environment(3, tmp_path / "home") == made


@linux
def test_what_was_set_before_is_kept(tmp_path: Path) -> None:
    ours = ":".join(device.MALLOC)
    before = {"GLIBC_TUNABLES": "glibc.malloc.check=1", "PATH": os.environ["PATH"]}
    made = device.cpu_environment(1, tmp_path, before)
    assert made["GLIBC_TUNABLES"] == f"{ours}:glibc.malloc.check=1"
    # Given on to a child that asks again, it does not grow.
    assert device.cpu_environment(1, tmp_path, {**before, **made})["GLIBC_TUNABLES"] == made["GLIBC_TUNABLES"]
    before["GLIBC_TUNABLES"] = device.MALLOC[0]
    again = device.cpu_environment(1, tmp_path, before)["GLIBC_TUNABLES"].split(":")
    assert sorted(again) == sorted(device.MALLOC)
    assert device.cpu_environment(1, tmp_path, {"PATH": ""})["GLIBC_TUNABLES"] == ours


@linux
def test_a_home_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="MILLPOND_HOME"):
        device.cpu_environment(1, tmp_path / "file")


@linux
def test_a_worker_gets_the_preloaded_blas_with_its_threads(tmp_path: Path) -> None:
    made = device.cpu_environment(1, tmp_path)
    assert "LD_PRELOAD" in made, "no installed OpenBLAS computes on this CPU"
    done = child("import mlx.core; from worker import device; print(device.blas_in_use())", made)
    assert done.returncode == 0 and done.stdout.startswith("openblas 0.") and done.stdout.endswith("(1 threads)\n")


@linux
def test_without_preload_the_reference_blas_is_named() -> None:
    done = child("import mlx.core, numpy; from worker import device; print(device.blas_in_use())", {"LD_PRELOAD": ""})
    assert done.stdout == "reference\n"


@linux
def test_a_blas_that_cannot_run_here_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libopenblas.so.0"
    broken.write_bytes(b"\x7fELF not really")
    monkeypatch.setattr(device, "openblas_libraries", lambda: [broken])
    assert "LD_PRELOAD" not in device.cpu_environment(1, tmp_path)


@linux
def test_a_kernel_that_a_power_cut_left_incomplete_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "mlx" / "0.0" / "cpu"
    folder.mkdir(parents=True)
    sound = b"\x7fELF\x02" + bytes(35) + struct.pack("<Q", 64) + bytes(10) + struct.pack("<HHH", 64, 2, 1) + bytes(128)
    for name, content in {
        "libwhole.so": sound, "libcut.so": sound[:-1], "libempty.so": b"", "libzero.so": bytes(500), "tmp_cut.so": b"",
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
    assert device.discard_broken_kernels(tmp_path) == 3
    assert sorted(os.listdir(folder)) == ["libwhole.so", "tmp_cut.so"]
    assert device.discard_broken_kernels(tmp_path) == 0


COMPUTE = """
import mlx.core as mx
from worker import device
print(bool(device.ensure_kernels_compile()))
@mx.compile
def fused(x):
    return mx.sin(x) * mx.exp(x) + 1
print(fused(mx.zeros(3)).tolist())
"""


@linux
def test_kernels_are_compiled_into_the_private_folder_and_found_there_again(tmp_path: Path) -> None:
    made = device.cpu_environment(1, tmp_path)
    assert child(COMPUTE, made).stdout == "False\n[1.0, 1.0, 1.0]\n"
    compiled = list(Path(made["TMPDIR"]).glob("mlx/*/cpu/lib*.so"))
    assert compiled
    assert device.discard_broken_kernels(Path(made["TMPDIR"])) == 0
    # Found again: a compiler that is not there is not missed.
    times = {path: path.stat().st_mtime_ns for path in compiled}
    assert child(COMPUTE, made | {"PATH": str(tmp_path)}).stdout == "False\n[1.0, 1.0, 1.0]\n"
    assert times == {path: path.stat().st_mtime_ns for path in compiled}


@linux
@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho broken; exit 1\n"])
def test_mlx_computes_without_a_compiler_and_with_a_broken_one(tmp_path: Path, compiler: str) -> None:
    if compiler:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    made = device.cpu_environment(1, tmp_path) | {"PATH": str(tmp_path)}
    assert child(COMPUTE, made).stdout == f"{bool(compiler)}\n[1.0, 1.0, 1.0]\n"


def test_the_device_is_asked_in_a_child() -> None:
    found = device.probe()
    assert found["backend"] in (device.METAL, device.CUDA, device.CPU)
    made = device.machine()
    assert made.backend == found["backend"] and len(made.names) == len(made.memory) >= 1
    assert min(made.memory) > 10**8


def test_a_child_that_gives_no_answer_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="mlx does not work here: no output"):
        device.probe()


def test_memory_is_counted() -> None:
    before = device.memory()
    held = mx.zeros(1_000_000)
    mx.eval(held)
    assert device.memory()["active"] >= before["active"] + 4_000_000
    assert device.available() > 10**8
    del held
    device.clear_cache()
    assert device.memory()["cache"] == 0


def test_describing_the_device_is_json() -> None:
    assert json.loads(json.dumps(device.describe()))["devices"][0]["memory"] > 0


PAIR = device.Machine(device.CUDA, ("H", "H"), (80 << 30, 40 << 30))


def test_a_budget_is_a_part_of_each_device_or_a_size() -> None:
    assert PAIR.budgets(0.5) == (40 << 30, 20 << 30)
    assert PAIR.budgets(7) == (7, 7)
    with pytest.raises(ConfigError, match="does not tell the memory of this cuda device"):
        device.Machine(device.CUDA, ("?",), (0,)).budgets(0.5)


def test_a_worker_on_cuda_sees_its_own_device_alone() -> None:
    assert PAIR.only(1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    # mlx counts what the operator left visible.
    assert PAIR.only(1, {"CUDA_VISIBLE_DEVICES": "4, GPU-5e"}) == {"CUDA_VISIBLE_DEVICES": "GPU-5e"}
    assert device.Machine(device.METAL, ("M",), (1,)).only(0, {"CUDA_VISIBLE_DEVICES": "4"}) == {}


def test_the_memory_of_a_gpu_is_what_its_backend_calls_it() -> None:
    facts = {"total_memory": 5, "max_recommended_working_set_size": 4}
    assert device.memory_of(device.CUDA, facts) == 5 and device.memory_of(device.METAL, facts) == 4
    assert device.memory_of(device.CUDA, {"memory_size": 3}) == 3 and device.memory_of(device.METAL, {}) == 0
