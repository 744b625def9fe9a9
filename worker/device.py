"""The machine's compute device: which backend, how much memory, which BLAS, and what a worker on it needs of its
environment.

The only module with memory limits and backend differences. Must never know a model or a request. mlx is imported inside
the functions that need it: the pool uses cpu_environment() and probe() and may not open a device.
Invariant: a worker's environment never names a library that would not run on this machine.
"""

import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.errors import ConfigError
from worker import sgemm

METAL, CUDA, CPU = "metal", "cuda", "cpu"

# CUDA's own variable: the devices that a process sees, by number or by name.
VISIBLE = "CUDA_VISIBLE_DEVICES"

# Importing mlx and opening a GPU takes a second or two; a driver that hangs must not hang the pool.
PROBE_TIMEOUT_S = 60.0

# Both carry OpenBLAS under its plain names. The first chooses its kernels by the CPU it finds; the second is built for
# CPUs with AVX-512 and dies by an illegal instruction on others.
BLAS_PACKAGES = ("ngsolve-openblas", "cmeel-openblas")

# mlx compiles its fused CPU kernels by "g++ -O3": for any CPU of its kind, with a call per element for each exp and fused
# multiply-add. With this machine's own instructions and exp inlined they are vector loops. Nobody asks for a trap or an
# errno; no other freedom is given, so infinities and NaN stay what they are.
KERNEL_FLAGS = "-march=native -fno-trapping-math -fno-math-errno -finline-limit=10000"

# Huge pages halve the time of the page faults that a growing KV cache costs. What a batch has freed stays with the
# process, up to half a GB, and the next one need not fault it in again; from 32 MB on, glibc's limit, it goes back at once.
MALLOC = (
    "glibc.malloc.hugetlb=1",
    f"glibc.malloc.trim_threshold={512 << 20}",
    f"glibc.malloc.mmap_threshold={32 << 20}",
)

# Two libraries that multiply by turns have two sets of threads, and one that still spins for its next product takes a core
# from the other: OpenBLAS's, for 2^28 cycles where nothing else is said.
WAITS = {"OPENBLAS_THREAD_TIMEOUT": "18"}

# With paths of preloaded libraries as arguments. Matrices of ones: each element of a product is the length of its sums. One
# that is large enough to take OpenBLAS's vector kernels; and what our own library does (worker/sgemm.cpp): few rows by a
# matrix that is not transposed, and by transposed ones of an odd length with enough work for two threads, of long columns, and
# of many rows.
TRY_BLAS = """
import array, ctypes, sys
with open("/proc/self/maps") as file:
    maps = file.read()
# What cannot be preloaded is passed over with a word on stderr.
if any(path not in maps for path in sys.argv[1:]):
    sys.exit(1)
number = ctypes.c_float
ones = (number * 600000).from_buffer(array.array("f", [1.0]) * 600000)
multiply = ctypes.CDLL(None).cblas_sgemm
shapes = (111, 64, 64, 64), (111, 5, 64, 64), (112, 7, 1000, 61), (112, 4, 131, 1701), (112, 300, 131, 1701)
for transposed, rows, columns, length in shapes:
    wide = max(length, columns if transposed == 111 else 0)
    product = (number * (rows * columns))()
    multiply(101, 111, transposed, rows, columns, length, number(1), ones, wide, ones, wide, number(0), product, columns)
    if set(product) != {length}:
        sys.exit(1)
"""


def backend() -> str:
    """metal, cuda or cpu: what mlx computes on in this process."""
    import mlx.core as mx

    if mx.default_device() != mx.gpu:
        return CPU
    return METAL if mx.metal.is_available() else CUDA


def _own_limit() -> int:
    import mlx.core as mx

    kind = backend()
    return psutil.virtual_memory().total if kind == CPU else memory_of(kind, mx.device_info())


def memory_of(kind: str, facts: Mapping[str, str | int]) -> int:
    """Bytes of a GPU that mlx describes by `facts`; 0: it does not say."""
    keys = ("max_recommended_working_set_size",) if kind == METAL else ("total_memory", "memory_size")
    return next((int(facts[key]) for key in keys if facts.get(key)), 0)


def available() -> int:
    """Bytes that an allocation could get now: on a CPU what the system has free, elsewhere the limit less our own
    use."""
    if backend() == CPU:
        return psutil.virtual_memory().available
    return max(0, _own_limit() - memory()["active"])


def memory() -> dict[str, int]:
    """Bytes that mlx holds in this process: in use, kept for reuse, most ever in use."""
    import mlx.core as mx

    return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": mx.get_peak_memory()}


def set_limits(memory_bytes: int, cache_bytes: int) -> None:
    """Tell mlx how much to use and to keep. On a CPU the first is not enforced by mlx: only the plan keeps to it.

    No wired limit: kernel panics are on record where one is set, and mlx serves from memory that is not wired too.
    """
    import mlx.core as mx

    mx.set_memory_limit(memory_bytes)
    mx.set_cache_limit(cache_bytes)


def clear_cache() -> None:
    """Give memory that mlx keeps for reuse back to the system."""
    import mlx.core as mx

    mx.clear_cache()


def describe() -> dict[str, Any]:
    """What the pool plans with: the backend, and its devices in order, each with name and memory (bytes; 0: unknown)."""
    import mlx.core as mx

    kind = backend()
    if kind != CUDA:
        # mlx sees one GPU on a Mac; a CPU is one device, whatever its cores.
        name = str(mx.device_info().get("device_name", "")) or platform.machine()
        return {"backend": kind, "devices": [{"name": name, "memory": _own_limit()}]}
    found = [mx.device_info(mx.Device(mx.gpu, index)) for index in range(mx.device_count(mx.gpu))]
    devices = [{"name": str(facts.get("device_name", "")), "memory": memory_of(kind, facts)} for facts in found]
    return {"backend": kind, "devices": devices}


@dataclass(frozen=True)
class Machine:
    """A machine as the pool sees it. memory: bytes of each device, in order; 0: mlx does not tell."""

    backend: str
    names: tuple[str, ...]
    memory: tuple[int, ...]

    def budgets(self, wanted: float | int) -> tuple[int, ...]:
        """Bytes that may be used of each device: a fraction of it, or a size. Raises ConfigError."""
        if isinstance(wanted, int):
            return tuple(wanted for _ in self.memory)
        if not all(self.memory):
            raise ConfigError(
                f"mlx does not tell the memory of this {self.backend} device; set MILLPOND_MEMORY_BUDGET to a size"
            )
        return tuple(int(memory * wanted) for memory in self.memory)

    def only(self, index: int, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """What to add to a worker's environment so that it sees this device alone; {} where there is one anyway."""
        if self.backend != CUDA:
            return {}
        before = (os.environ if inherited is None else inherited).get(VISIBLE, "")
        # The operator's own choice counts in the order in which he named them.
        visible = [name.strip() for name in before.split(",")] if before.strip() else []
        return {VISIBLE: visible[index] if index < len(visible) else str(index)}


def machine() -> Machine:
    """This one. Raises ConfigError."""
    found = probe()
    devices = found["devices"]
    return Machine(
        found["backend"], tuple(one["name"] for one in devices), tuple(int(one["memory"]) for one in devices)
    )


def probe() -> dict[str, Any]:
    """describe() asked of a child process, for a process that must not open the device itself. Raises ConfigError."""
    command = [sys.executable, "-m", "worker.device"]
    root = str(Path(__file__).resolve().parent.parent)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, cwd=root, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot ask mlx for its device: {type(error).__name__}") from None
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"mlx does not work here: {last}; reinstall with the extra for this machine") from None


# --- Workers on a CPU -------------------------------------------------------------------------------------------------


def cpu_environment(
    threads: int, home: Path, inherited: Mapping[str, str] | None = None, *, own_kernels: bool = True
) -> dict[str, str]:
    """What to add to the environment of a worker that computes on a Linux CPU; {} on other systems.

    One BLAS thread per core of its share; a BLAS that is worth having, and before it our own multiplication; a
    compiler that makes good kernels; and a private folder for these that survives restarts. All workers share that folder:
    mlx compiles under a random name and renames, so that none sees another's half-written kernel. own_kernels False:
    mlx's kernels and OpenBLAS's, as they come. Raises ConfigError when the folder cannot be made.
    """
    if sys.platform != "linux":
        return {}
    before = os.environ if inherited is None else inherited
    made = {
        "OPENBLAS_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": _tunables(before.get("GLIBC_TUNABLES", "")),
    }
    if not own_kernels:
        return made | _blas_environment(home, before, None)
    folder = kernel_folder(home)
    try:
        own = sgemm.library(folder, before)
    except OSError as error:
        raise ConfigError(f"cannot use the kernel folder {folder}: {error.strerror}; set MILLPOND_HOME") from None
    made |= {"TMPDIR": str(folder)} | _compiler_environment(folder, before)
    return made | _blas_environment(home, before, own)


def _blas_environment(home: Path, before: Mapping[str, str], own: Path | None) -> dict[str, str]:
    """Preloads the first OpenBLAS that computes on this machine, after our `own` library where that does too; {} without
    one: mlx's reference BLAS then does."""
    found = openblas_libraries()
    fortran = str(_fortran_folder(home)) if found else ""
    for library in found:
        for libraries in ([own, library] if own else [library], [library]):
            preload = {
                "LD_PRELOAD": _joined(":".join(map(str, libraries)), before.get("LD_PRELOAD")),
                "LD_LIBRARY_PATH": _joined(fortran, before.get("LD_LIBRARY_PATH")),
            }
            # A preloaded library that cannot be loaded, or has instructions this CPU lacks, would end every worker at once.
            if _computes({**before, **preload}, libraries):
                waits = {name: before.get(name, value) for name, value in WAITS.items()}
                return preload | (waits if own in libraries else {})
    return {}


def _tunables(before: str) -> str:
    """MALLOC before what was set already, whose word is the last."""
    return ":".join([*(one for one in MALLOC if one not in before.split(":")), *filter(None, [before])])


def _joined(first: str, second: str | None) -> str:
    """Both lists of paths, without what is in both twice."""
    begun = first.split(":")
    return ":".join([*begun, *(part for part in (second or "").split(":") if part and part not in begun)])


def openblas_libraries() -> list[Path]:
    """The OpenBLAS libraries with plain names that installed packages carry, best first."""
    return [path for package in BLAS_PACKAGES for path in _carried(package, "libopenblas")[:1]]


def _carried(package: str, prefix: str) -> list[Path]:
    """Shared libraries of a package, longest name first: the file itself rather than what stands for it."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = [Path(str(file.locate())) for file in files if file.name.startswith(prefix) and ".so" in file.name]
    return sorted((path.resolve() for path in found if path.is_file()), key=lambda path: -len(path.name))


def _fortran_folder(home: Path) -> Path:
    """A folder where OpenBLAS finds the Fortran runtime, which it wants under its plain name: mlx's wheel carries one
    under a name of its own, with a second library that it looks for beside itself."""
    folder = home / "libraries"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in _carried("mlx-cpu", "libgfortran")[:1]:
            _link(folder / "libgfortran.so.5", path)
        for path in _carried("mlx-cpu", "libquadmath"):
            _link(folder / path.name, path)
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}; set MILLPOND_HOME") from None
    return folder


def _link(link: Path, target: Path) -> None:
    """Make or renew a link in one step: another instance may be starting from the same folder."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def _computes(environment: Mapping[str, str], libraries: Sequence[Path]) -> bool:
    """Whether a process with this environment has these libraries, multiplies matrices and lives."""
    command = [sys.executable, "-I", "-S", "-c", TRY_BLAS, *(str(path.resolve()) for path in libraries)]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, check=False, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _compiler_environment(folder: Path, before: Mapping[str, str]) -> dict[str, str]:
    """A "g++" that adds KERNEL_FLAGS, first in the PATH, because mlx calls it by that name; {} without a compiler."""
    own = str(folder / "bin")
    paths = [path for path in before.get("PATH", os.defpath).split(os.pathsep) if path != own]
    compiler = shutil.which("g++", path=os.pathsep.join(paths))
    if compiler is None:
        return {}
    quoted = shlex.quote(compiler)
    # Without them where they are not understood.
    script = f'#!/bin/sh\n{quoted} {KERNEL_FLAGS} "$@" 2>/dev/null || exec {quoted} "$@"\n'
    try:
        (folder / "bin").mkdir(mode=0o700, exist_ok=True)
        fresh = folder / "bin" / f".g++.{os.getpid()}"
        fresh.write_text(script)
        fresh.chmod(0o700)
        fresh.replace(folder / "bin" / "g++")
    except OSError as error:
        raise ConfigError(f"cannot use the kernel folder {folder}: {error.strerror}; set MILLPOND_HOME") from None
    return {"PATH": os.pathsep.join([own, *paths])}


def _cpu() -> str:
    """A name for this kind of CPU: kernels that were compiled for one would end a worker on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    # What the first core says of its instructions; x86 and ARM name the line differently.
    said = next((line for line in lines if line.lower().startswith(("flags", "features", "isa"))), "")
    digest = hashlib.blake2b(f"{said}:{KERNEL_FLAGS}".encode(), digest_size=4).hexdigest()
    return f"{platform.machine()}-{digest}"


def kernel_folder(home: Path) -> Path:
    """The folder for this CPU's compiled kernels under `home`, private: who can write there runs code in our workers."""
    folder = home / "kernels" / _cpu()
    try:
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.chmod(0o700)
        discard_broken_kernels(folder)
    except OSError as error:
        raise ConfigError(f"cannot use the kernel folder {folder}: {error.strerror}; set MILLPOND_HOME") from None
    return folder


def discard_broken_kernels(folder: Path) -> int:
    """Remove compiled kernels that a power cut left incomplete; returns how many.

    mlx takes any file that is there, and loading a shortened one is a bus error at every start.
    """
    kernels = [*folder.glob("mlx/*/cpu/lib*.so"), *folder.glob(f"{sgemm.NAME}-*.so")]
    broken = [path for path in kernels if not _is_whole_elf(path)]
    for path in broken:
        path.unlink(missing_ok=True)
    return len(broken)


def _is_whole_elf(path: Path) -> bool:
    """Whether the section headers, which the linker puts at the end, lie inside the file (64-bit ELF)."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02"):
        return False
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    entry_size, count = struct.unpack_from("<HH", head, 58)
    return 0 < sections_at and sections_at + entry_size * count <= path.stat().st_size


def ensure_kernels_compile() -> str:
    """Make mlx work whether or not kernels can be compiled here; returns "" or why they are not.

    Without a compiler mlx runs unfused by itself; with one that fails it would raise in the middle of a step.
    """
    import mlx.core as mx

    @mx.compile
    def fused(x: mx.array) -> mx.array:
        # Two operations: a single one is not compiled.
        return mx.exp(x) + 1

    if backend() != CPU:
        return ""
    try:
        mx.eval(fused(mx.zeros(4)))
    except RuntimeError as error:
        mx.disable_compile()
        return str(error).splitlines()[0][:200]
    return ""


def blas_in_use() -> str:
    """The matrix library that this process really got: "openblas 0.3.33 (2 threads)", "reference", "accelerate"."""
    if sys.platform == "darwin":
        return "accelerate"
    # Only a preloaded one: numpy brings an OpenBLAS of its own, under other names, that mlx's calls never reach.
    library = next((path for path in sgemm.preloaded() if "openblas" in path.name), None)
    if library is None:
        return "reference"
    openblas = ctypes.CDLL(str(library))
    openblas.openblas_get_config.restype = ctypes.c_char_p
    version = openblas.openblas_get_config().decode().split()[1]
    return f"openblas {version} ({openblas.openblas_get_num_threads()} threads)"


if __name__ == "__main__":
    print(json.dumps(describe()))
