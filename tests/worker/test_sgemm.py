"""Our own multiplication: the right product for every shape, and nothing but it."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker import device, sgemm

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("g++"),
    reason="for Linux on x86_64 with a compiler",
)


@pytest.fixture(scope="module", params=[(), ("-mno-avx512f",)], ids=["this CPU", "16 registers"])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a worker of two threads gets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sgemm, "FLAGS", (*sgemm.FLAGS, *request.param))
        made = device.cpu_environment(2, tmp_path_factory.mktemp("home"))
    assert sgemm.NAME in made.get("LD_PRELOAD", ""), "not compiled, or it does not compute here"
    yield made


def child(program: str, environment: dict[str, str], **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env={**os.environ, **environment, **more}, capture_output=True,
        text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# sgemm() of numpy arrays, which may lie in wider ones, by whatever library comes first.
MULTIPLY = """
import ctypes, hashlib, itertools, json
import numpy as np
first = ctypes.CDLL(None).cblas_sgemm
number = ctypes.c_float
draw = np.random.default_rng(0)
def wide(rows, columns, more):
    return draw.standard_normal((rows, columns + more), np.float32)
def address(array):
    return array.ctypes.data_as(ctypes.c_void_p)
def sgemm(a, b, c, rows, columns, length, alpha=1.0, beta=0.0, flags=(101, 111, 112)):
    first(*flags, rows, columns, length, number(alpha), address(a), a.shape[1], address(b), b.shape[1], number(beta),
          address(c), c.shape[1])
"""

EVERY_SHAPE = MULTIPLY + """
worst = 0.0
def check(rows, columns, length, more, turned):
    global worst
    a, c = wide(rows, length, more), wide(rows, columns, more)
    b = wide(length, columns, more) if turned else wide(columns, length, more)
    before, left = c.copy(), a[:, :length].astype(np.float64)
    right = b[:, :columns].astype(np.float64) if turned else b[:, :length].astype(np.float64).T
    exact, size = left @ right, np.abs(left) @ np.abs(right)
    for beta in (0.0, 1.0):
        sgemm(a, b, c, rows, columns, length, beta=beta, flags=(101, 111, 111 if turned else 112))
        wanted = exact + beta * before[:, :columns]
        worst = max(worst, float((np.abs(c[:, :columns] - wanted) / (size + np.abs(wanted))).max()))
        assert (c[:, columns:] == before[:, columns:]).all(), "written beside the result"
        c[:] = before
small = (*range(1, 18), 31, 32, 33), (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 65), (1, 2, 7, 8, 9, 31, 64, 67, 576), (0, 3)
for shape in itertools.product(*small, (False, True)):
    check(*shape)
# Long columns go in pieces, many rows in passes, and wide matrices in stretches.
for shape in itertools.product((1, 5, 40, 300), (5, 200, 700), (852, 853, 854, 2000), (0, 3), (False,)):
    check(*shape)
for shape in itertools.product((3, 8), (128, 512, 513), (2000,), (0, 3), (True,)):
    check(*shape)
# Nothing by something, and something by nothing.
for rows, columns, length in ((0, 5, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)):
    c = np.ones((rows, max(columns, 1)), np.float32)
    sgemm(wide(rows, max(length, 1), 0), wide(columns, max(length, 1), 0), c, rows, columns, length)
    assert (c[:, :columns] == 0).all()
print(worst)
"""


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_every_shape_is_multiplied_and_nothing_beside_it_written(environment: dict[str, str], threads: str) -> None:
    # The bound of any order of 2,000 additions is 2,000 roundings of 6e-8; sums of sums are far better.
    assert float(child(EVERY_SHAPE, environment, OPENBLAS_NUM_THREADS=threads)) < 2e-6


OTHERS = MULTIPLY + """
for rows in (1, 5, 16, 17, 33):
    a, b, c = wide(rows, 40, 0), wide(24, 40, 0), wide(rows, 24, 0)
    before, product = c.copy(), a @ b.T
    turned = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    for alpha, beta in ((1, 0), (1, 1), (2, 0), (1, 0.5), (-1, 1)):
        for first_turned, second_turned in itertools.product((False, True), repeat=2):
            c[:] = before
            flags = (101, 112 if first_turned else 111, 111 if second_turned else 112)
            x, y = turned[0] if first_turned else a, turned[1] if second_turned else b
            sgemm(x, y, c, rows, 24, 40, alpha, beta, flags)
            assert np.allclose(c, alpha * product + beta * before, atol=1e-4), (rows, alpha, beta, flags)
"""


def test_what_it_does_not_do_goes_to_the_blas(environment: dict[str, str]) -> None:
    child(OTHERS, environment)


BITS = MULTIPLY + """
import os
found = []
for many, wide_by, flags in ((16, 700, (101, 111, 112)), (16, 128, (101, 111, 111))):
    turned = flags[2] == 111
    a, b = wide(many, 2000, 0), wide(2000, wide_by, 0) if turned else wide(wide_by, 2000, 0)
    every = np.zeros((many, wide_by), np.float32)
    sgemm(a, b, every, many, wide_by, 2000, flags=flags)
    found.append(every.tobytes())
    for rows in range(1, many):
        for at in (0, many - rows):
            part = np.zeros((rows, wide_by), np.float32)
            sgemm(a[at:at + rows], b, part, rows, wide_by, 2000, flags=flags)
            assert (part == every[at:at + rows]).all(), (rows, at)
    for columns in (1, 5, wide_by - 1):
        part = np.zeros((many, columns), np.float32)
        sgemm(a, b, part, many, columns, 2000, flags=flags)
        assert (part == every[:, :columns]).all(), columns
# Rows in passes: as many as are multiplied here at all.
if "avx512dq" in open("/proc/cpuinfo").read() and os.environ["MANY"]:
    a, b = wide(203, 1000, 0), wide(67, 1000, 0)
    every = np.zeros((203, 67), np.float32)
    sgemm(a, b, every, 203, 67, 1000)
    for row in range(203):
        one = np.zeros((1, 67), np.float32)
        sgemm(a[row:row + 1], b, one, 1, 67, 1000)
        assert (one == every[row]).all(), row
print(hashlib.sha256(b"".join(found)).hexdigest())
"""


def test_a_row_is_the_same_to_the_bit_beside_any_others_and_on_any_number_of_threads(
    environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    many = "" if "16 registers" in request.node.name else "rows"
    made = {child(BITS, environment, OPENBLAS_NUM_THREADS=threads, MANY=many) for threads in ("1", "2", "3", "7", "70")}
    assert len(made) == 1


# Threads of ours that multiply at the same time, and helpers that get a core late or lose it: each product is checked by its
# sum, of whole numbers that float32 holds.
TOGETHER = MULTIPLY + """
import os, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
def multiply_for_a_while(seed):
    draw = np.random.default_rng(seed)
    matrices = [draw.integers(-3, 4, (draw.integers(1, 900), draw.integers(1, 600))).astype(np.float32) for _ in range(20)]
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        b = matrices[draw.integers(20)]
        rows = int(draw.integers(1, 16))
        a, c = draw.integers(-3, 4, (rows, b.shape[1])).astype(np.float32), np.full((rows, b.shape[0]), 7, np.float32)
        sgemm(a, b, c, rows, *b.shape)
        if not np.array_equal(c, a @ b.T):
            wrong.append((rows, b.shape))
wrong = []
def all_at_once():
    threads = [threading.Thread(target=multiply_for_a_while, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
multiply_for_a_while(9)
all_at_once()
# A forked process has none of the helpers, and gets its own.
child = os.fork()
if not child:
    code = 1
    try:
        before = len(os.listdir("/proc/self/task"))
        sgemm(wide(4, 1000, 0), wide(500, 1000, 0), wide(4, 500, 0), 4, 500, 1000)
        assert len(os.listdir("/proc/self/task")) == before + 3, "other helpers than its own"
        multiply_for_a_while(5)
        all_at_once()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_at_once_late_helpers_and_a_fork_lose_nothing(environment: dict[str, str]) -> None:
    child(TOGETHER, environment, OPENBLAS_NUM_THREADS="4")


STRETCHES = """
#include "SOURCE"
#include <cstdio>
int main() {
    static Job job;
    for (int columns : {1, 5, 6, 64, 192, 576, 1536, 49152, 151936})
        for (int threads = 1; threads <= 128; threads++)
            for (int unit : {COLUMNS, STRIP * LANES}) {
                job.prepare(transposed, Matrices{}, columns, unit, threads);
                int from = 0, widest = 0, count = job.stretches;
                for (int i = 0; i < count; from = job.ends[i++]) {
                    if (job.ends[i] <= from) return std::printf("empty: %d %d", columns, threads), 1;
                    widest = std::max(widest, job.ends[i] - from);
                }
                if (from != columns) return std::printf("%d of %d columns", from, columns), 1;
                if (widest > columns / threads + unit) return std::printf("%d of %d for %d", widest, columns, threads), 1;
            }
}
"""


def test_no_thread_gets_more_than_its_share_however_many_there_are(tmp_path: Path) -> None:
    program = tmp_path / "stretches.cpp"
    program.write_text(STRETCHES.replace("SOURCE", str(sgemm.SOURCE)))
    flags = [flag for flag in sgemm.FLAGS if flag not in ("-shared", "-fPIC", "-O3")]
    subprocess.run(["g++", *flags, "-o", str(tmp_path / "stretches"), str(program), "-ldl"], check=True)
    done = subprocess.run([str(tmp_path / "stretches")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


EDGES = MULTIPLY + """
for value in (np.nan, np.inf, -np.inf, 1e-40):
    a, b, c = wide(3, 70, 0), np.ones((13, 70), np.float32), wide(3, 13, 0)
    a[1, 5] = value
    if value == 1e-40:
        a[:] = value
    sgemm(a, b, c, 3, 13, 70)
    wanted = a @ b.T
    assert np.array_equal(np.isnan(c), np.isnan(wanted)) and np.array_equal(np.isinf(c), np.isinf(wanted)), value
    assert (c != 0).all(), "numbers this small are numbers"
"""


def test_infinities_nan_and_the_smallest_numbers_stay_what_they_are(environment: dict[str, str]) -> None:
    child(EDGES, environment)


USED = MULTIPLY + """
import mlx.core as mx
from worker.sgemm import in_use
a, b, c = wide(3, 1000, 0), wide(700, 1000, 0), wide(3, 700, 0)
product = np.array(mx.array(a)[:, None] @ mx.array(b).T)[:, 0]
sgemm(a, b, c, 3, 700, 1000)
print(json.dumps([in_use(), bool((product == c).all()), hashlib.sha256(product.tobytes()).hexdigest()]))
"""


def test_mlx_multiplies_by_it(environment: dict[str, str]) -> None:
    used, alike, ours = json.loads(child(USED, environment))
    assert used and alike
    blas = ":".join(environment["LD_PRELOAD"].split(":")[1:])
    used, _, other = json.loads(child(USED, environment, LD_PRELOAD=blas))
    assert not used and ours != other, "the order of additions tells whose product it is"


def test_it_is_compiled_once_and_again_when_a_power_cut_left_it_incomplete(tmp_path: Path) -> None:
    preload = device.cpu_environment(1, tmp_path)["LD_PRELOAD"].split(":")
    made = Path(preload[0])
    assert made.name.startswith(sgemm.NAME) and made.is_relative_to(tmp_path)
    written = made.stat().st_mtime_ns
    assert device.cpu_environment(1, tmp_path)["LD_PRELOAD"].split(":") == preload
    assert made.stat().st_mtime_ns == written
    # It is in use: another file takes its place.
    cut = made.with_suffix(".cut")
    cut.write_bytes(made.read_bytes()[:5000])
    cut.replace(made)
    assert device.cpu_environment(1, tmp_path)["LD_PRELOAD"].split(":") == preload
    assert made.stat().st_size > 5000 and [path for path in made.parent.iterdir() if sgemm.NAME in path.name] == [made]


@pytest.mark.parametrize("compiler", ["", "#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n", "#!/not/there\n", "nothing"])
def test_without_a_compiler_that_can_the_blas_does_it_all(tmp_path: Path, compiler: str) -> None:
    if compiler:
        (tmp_path / "g++").write_text(compiler)
        (tmp_path / "g++").chmod(0o755)
    made = device.cpu_environment(1, tmp_path, {"PATH": str(tmp_path)})
    assert "openblas" in made["LD_PRELOAD"] and sgemm.NAME not in made["LD_PRELOAD"]


def test_a_library_that_computes_wrongly_or_ends_the_process_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PROBE_TIMEOUT_S", 5.0)
    # The last is wrong in one element.
    for body in ("__builtin_trap();", "if (m < 17) for (;;) __asm__(\"\");", "if (m < 17) c[0] = 1; else PASSED_ON;", "PASSED_ON; if (m < 17) c[n - 1] = 1;"):
        source = tmp_path / "sgemm.cpp"
        passed_on = body.replace("PASSED_ON", "next(o, ta, tb, m, n, k, al, a, la, b, lb, be, c, lc)")
        source.write_text(
            "#include <dlfcn.h>\n"
            "typedef void F(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);"
            'extern "C" void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float al, const float *a, int la, '
            "const float *b, int lb, float be, float *c, int lc) {"
            f' static F *next = (F *)dlsym(RTLD_NEXT, "cblas_sgemm"); (void)next; {passed_on} }}'
        )
        monkeypatch.setattr(sgemm, "SOURCE", source)
        made = device.cpu_environment(1, tmp_path / "home")
        assert sgemm.NAME not in made["LD_PRELOAD"] and "openblas" in made["LD_PRELOAD"]
    # As it is, but for nothing: so the trial can pass.
    source.write_text(source.read_text().replace("c[n - 1] = 1;", ";"))
    assert sgemm.NAME in device.cpu_environment(1, tmp_path / "home")["LD_PRELOAD"]


def test_a_folder_that_cannot_be_named_or_a_library_that_is_not_loaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = device.cpu_environment(1, tmp_path / "a home")
    assert sgemm.NAME not in made["LD_PRELOAD"] and "openblas" in made["LD_PRELOAD"]
    # The loader passes over it: as it does on a file system that nothing may be executed from.
    (tmp_path / "sgemm-0.so").write_text("no library")
    monkeypatch.setattr(sgemm, "library", lambda folder, environment: tmp_path / "sgemm-0.so")
    made = device.cpu_environment(1, tmp_path / "home")
    assert sgemm.NAME not in made["LD_PRELOAD"] and "openblas" in made["LD_PRELOAD"]


def test_threads_of_two_libraries_wait_for_their_next_product_only_shortly(tmp_path: Path) -> None:
    made = device.cpu_environment(1, tmp_path)
    assert device.WAITS.items() <= made.items()
    chosen = device.cpu_environment(1, tmp_path, {**os.environ, "OPENBLAS_THREAD_TIMEOUT": "7"})
    assert chosen["OPENBLAS_THREAD_TIMEOUT"] == "7"
    # OpenBLAS by itself keeps its own: its threads would sleep between the products of a decode step.
    assert not device.WAITS.keys() & device.cpu_environment(1, tmp_path, own_kernels=False).keys()


def test_mlx_as_it_comes_has_neither_it_nor_our_compiler(tmp_path: Path) -> None:
    made = device.cpu_environment(1, tmp_path, own_kernels=False)
    assert "openblas" in made["LD_PRELOAD"] and sgemm.NAME not in made["LD_PRELOAD"]
    assert not {"PATH", "TMPDIR"} & made.keys()
