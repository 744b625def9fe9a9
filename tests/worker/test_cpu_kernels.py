"""The CPU's attention, rotary embedding, norm and softmax against mlx's own."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import load_model, save_config, save_model

from worker import device
from worker.engines import cpu_kernels, mlx_lm_0_32
from worker.engines.weights import load_weights
from worker.plan import FLOAT32

pytestmark = pytest.mark.skipif(device.backend() != device.CPU, reason="only used on a CPU")

# Rows, heads, heads of keys, queries, keys, size of a head's keys, of its values.
SHAPES = [
    (1, 1, 1, 1, 1, 4, 4),
    (3, 6, 2, 1, 17, 8, 8),
    (2, 4, 4, 5, 9, 8, 12),
    (1, 8, 1, 7, 7, 16, 16),
    (2, 9, 3, 33, 70, 64, 64),
]
own, theirs = cpu_kernels.attention, cpu_kernels._mlx_attention


def masks(batch: int, heads: int, length: int, width: int) -> dict[str, str | mx.array | None]:
    seen = mx.arange(width - length, width)[:, None] >= mx.arange(width)
    padding = (mx.arange(batch) % 3)[:, None, None, None] <= mx.arange(width)
    return {
        "none": None,
        "causal": "causal",
        "2d": seen,
        # The first queries of a padded row see nothing at all.
        "left padding": seen & padding,
        "by head": mx.random.uniform(shape=(batch, heads, length, width)) < 0.7,
        "added": mx.random.normal((1, 1, length, width)),
        "added by head": mx.random.normal((heads, length, width)),
    }


# At once, and in blocks of four queries.
@pytest.mark.parametrize("block", [128, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_mlx_own(shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "BLOCK", block)
    batch, heads, groups, length, width, size, out = shape
    mx.random.seed(len(str(shape)))
    # As the caches give them: the first columns of larger arrays.
    q = mx.random.normal((batch, heads, length, size)) * 3
    k = mx.random.normal((batch, groups, width + 11, size))[:, :, :width] * 3
    v = mx.random.normal((batch, groups, width + 11, out))[:, :, :width]
    for name, mask in masks(batch, heads, length, width).items():
        ours, expected = own(q, k, v, scale=0.3, mask=mask), theirs(q, k, v, scale=0.3, mask=mask)
        assert ours.shape == expected.shape and ours.dtype == mx.float32
        error = mx.abs(ours - expected)
        if name == "left padding":
            # What sees nothing at all is any number.
            error = mx.where(mx.any(mask, axis=-1, keepdims=True), error, mx.isnan(error).astype(mx.float32))
        assert error.max().item() < 2e-5, name


def test_a_block_of_queries_is_not_multiplied_with_keys_that_none_of_them_sees() -> None:
    length, width = 300, 500
    causal = mx.arange(width - length, width)[:, None] >= mx.arange(width)
    padded = (causal & (mx.arange(width) >= 7))[None, None]
    for mask in ("causal", causal, padded):
        blocks = cpu_kernels._blocks(mask, 1, length, width)
        assert [(block.queries, block.keys) for block in blocks] == [
            (range(0, 128), 328), (range(128, 256), 456), (range(256, 300), 500)
        ]  # fmt: skip
    # One key past a query's own is enough; and what is added, or is the same for all queries, is not looked into.
    other = mx.array(causal)
    other[0, 299] = True
    other[100, 420] = True
    assert not mx.array_equal(other, causal)
    every = mx.ones((1, width), mx.bool_)
    for mask in (None, other, mx.where(causal, 0.0, -1e9), every):
        assert {block.keys for block in cpu_kernels._blocks(mask, 1, length, width)} == {width}
    q, k = mx.random.normal((1, 2, length, 8)), mx.random.normal((1, 1, width, 8))
    for mask in (padded, other, every):
        assert mx.allclose(own(q, k, k, scale=1.0, mask=mask), theirs(q, k, k, scale=1.0, mask=mask), atol=2e-5)


def test_masks_that_nobody_passes_are_mlx_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "BLOCK", 4)
    for length, width in ((9, 5), (6, 11), (1, 3)):
        q, k = mx.random.normal((2, 4, length, 8)), mx.random.normal((2, 2, width, 8))
        causal = mx.arange(width - length, width)[:, None] >= mx.arange(width)
        sees = mx.any(causal, axis=-1)[None, None, :, None]
        for mask in ("causal", causal, mx.arange(width) > 1, mx.random.normal((width,)), mx.ones((length, 1), mx.bool_)):
            ours, expected = own(q, k, k, scale=1.0, mask=mask), theirs(q, k, k, scale=1.0, mask=mask)
            assert mx.where(sees, mx.abs(ours - expected), 0.0).max().item() < 2e-5


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVCache(), lambda: RotatingKVCache(max_size=16), lambda: RotatingKVCache(max_size=16, keep=4),
        lambda: BatchKVCache([3, 0]), lambda: BatchRotatingKVCache(16, [3, 0]),
    ],
)  # fmt: skip
def test_each_cache_s_own_masks_in_blocks(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "BLOCK", 4)
    mx.random.seed(3)
    cache = make()
    batch = cache.offset.size if isinstance(cache.offset, mx.array) else 1
    # A prompt in two stretches, tokens one by one until a window has turned over, and once more a stretch.
    for length in (9, 13, *[1] * 7, 11):
        mask = create_attention_mask(mx.zeros((batch, length, 8)), cache)
        q = mx.random.normal((batch, 4, length, 8))
        k, v = cache.update_and_fetch(*(mx.random.normal((batch, 2, length, 8)) for _ in range(2)))
        error = mx.abs(own(q, k, v, scale=0.5, mask=mask) - theirs(q, k, v, scale=0.5, mask=mask))
        if isinstance(mask, mx.array):
            error = mx.where(mx.any(mask, axis=-1, keepdims=True), error, mx.isnan(error).astype(mx.float32))
        assert error.max().item() < 2e-5


def test_great_scores_neither_overflow_nor_vanish() -> None:
    q, k = mx.full((1, 1, 1, 4), 50.0), mx.array([[1.0] * 4, [0.99] * 4, [-1.0] * 4])[None, None]
    v = mx.array([[1.0], [2.0], [3.0]])[None, None]
    expected = theirs(q, k, v, scale=1.0)
    assert mx.abs(own(q, k, v, scale=1.0) - expected).item() < 1e-5 and 1 < expected.item() < 2


def test_what_is_not_a_number_stays_so_in_its_row() -> None:
    q = mx.ones((2, 1, 1, 4))
    k = mx.concatenate([mx.ones((1, 1, 3, 4)), mx.full((1, 1, 3, 4), mx.nan)])
    found = own(q, k, mx.ones((2, 1, 3, 4)), scale=1.0)
    assert mx.isfinite(found[0]).all().item() and mx.isnan(found[1]).all().item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_and_sinks_are_left_to_mlx(dtype: mx.Dtype) -> None:
    q, k, v = (mx.random.normal((1, 2, 3, 8)).astype(dtype) for _ in range(3))
    assert own(q, k, v, scale=1.0).dtype == dtype
    q, k, v = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    sinks = mx.array([5.0, 6.0])
    with_sinks = own(q, k, v, scale=1.0, sinks=sinks)
    assert mx.array_equal(with_sinks, theirs(q, k, v, scale=1.0, sinks=sinks))
    assert mx.abs(with_sinks - own(q, k, v, scale=1.0)).max().item() > 0.01


@pytest.mark.parametrize("offset", [0, 7, "scalar", "one", "rows"])
@pytest.mark.parametrize("length", [1, 5])
def test_rotary_embedding_is_mlx_own(offset: int | str, length: int) -> None:
    mx.random.seed(length)
    arrays = {"scalar": mx.array(5), "one": mx.array([6]), "rows": mx.array([3, -2, 1000])}
    at = arrays[offset] if isinstance(offset, str) else offset
    x = mx.random.normal((3, length, 4, 16)).transpose(0, 2, 1, 3)
    frequencies = mx.exp(mx.random.uniform(0, 9, (8,)))
    for dims, base, scale, freqs in [
        (16, 10000.0, 1.0, None), (16, 500.0, 0.25, None), (16, None, 1.0, frequencies), (8, 10000.0, 1.0, None),
        (8, None, 2.0, frequencies[:4]),
    ]:  # fmt: skip
        how = {"traditional": False, "base": base, "scale": scale, "offset": at, "freqs": freqs}
        expected = cpu_kernels._mlx_rope(x, dims, **how)
        with cpu_kernels.one_pass():
            found = [cpu_kernels.rope(x, dims, **how) for _ in range(2)]
        for ours in (*found, cpu_kernels.rope(x, dims, **how)):
            assert ours.shape == expected.shape and mx.abs(ours - expected).max().item() < 1e-6


def test_angles_are_shared_in_a_pass_and_not_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may be changed in place: the next pass must not take its old angles for the same."""
    made = []
    angles = cpu_kernels._angles
    monkeypatch.setattr(cpu_kernels, "_angles", lambda *of: made.append(of) or angles(*of))
    x, offset = mx.random.normal((2, 3, 1, 8)), mx.array([4, 9])
    how = {"traditional": False, "base": 100.0, "scale": 1.0}
    for at in (4, 5):
        with cpu_kernels.one_pass():
            found = [cpu_kernels.rope(x, 8, offset=offset, **how) for _ in range(6)]
            # Another array of the same numbers is another one.
            cpu_kernels.rope(x, 8, offset=mx.array([at, at + 5]), **how)
        expected = cpu_kernels._mlx_rope(x, 8, offset=mx.array([at, at + 5]), **how)
        assert all(mx.allclose(one, expected, atol=1e-6) for one in found)
        offset += 1
    assert len(made) == 4
    for frequencies in (mx.array([1.0, 2.0, 3.0, 4.0]), mx.array([1.0, 2.0, 3.0, 5.0])):
        # A plain number needs no pass; but equal arrays are not the same frequencies.
        for _ in range(6):
            ours = cpu_kernels.rope(x, 8, offset=12345, freqs=frequencies, **how | {"base": None})
        expected = cpu_kernels._mlx_rope(x, 8, offset=12345, freqs=frequencies, **how | {"base": None})
        assert mx.allclose(ours, expected, atol=1e-6)
    assert len(made) == 6


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), cpu_kernels.one_pass():
        cpu_kernels.rope(mx.zeros((1, 1, 1, 8)), 8, traditional=False, base=10.0, scale=1.0, offset=mx.array([1]))
        raise ZeroDivisionError
    assert cpu_kernels._shared is None


def test_a_mask_s_bias_is_made_once_in_a_pass() -> None:
    q, k = mx.random.normal((2, 4, 1, 8)), mx.random.normal((2, 2, 9, 8))
    mask = mx.arange(9) >= mx.array([0, 3])[:, None, None, None]
    with cpu_kernels.one_pass():
        found = [own(q, k, k, scale=0.5, mask=mask) for _ in range(3)]
        assert cpu_kernels._shared is not None and len(cpu_kernels._shared) == 1
    assert all(mx.allclose(one, theirs(q, k, k, scale=0.5, mask=mask), atol=1e-5) for one in found)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 3, 4, 16)])
def test_rms_norm_is_mlx_own(shape: tuple[int, ...]) -> None:
    for scale, eps in ((1.0, 1e-5), (1e-4, 1e-6), (1e15, 1e-5)):
        x, weight = mx.random.normal(shape) * scale, mx.random.normal(shape[-1:])
        expected = cpu_kernels._mlx_rms_norm(x, weight, eps)
        assert mx.allclose(cpu_kernels.rms_norm(x, weight, eps), expected, rtol=1e-5, atol=0.0)
    zeros = mx.zeros(shape)
    assert mx.array_equal(cpu_kernels.rms_norm(zeros, weight, eps), zeros)
    broken = mx.concatenate([mx.full((1, *shape[1:]), mx.nan), mx.ones((shape[0] - 1, *shape[1:]))])
    found = cpu_kernels.rms_norm(broken, weight, eps)
    assert mx.isnan(found[0]).all().item() and mx.isfinite(found[1:]).all().item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_norms_and_rotations_of_other_types_and_kinds_are_left_to_mlx(dtype: mx.Dtype) -> None:
    x, weight = mx.random.normal((2, 3, 4, 8)), mx.random.normal((8,))
    assert cpu_kernels.rms_norm(x.astype(dtype), weight.astype(dtype), 1e-5).dtype == dtype
    assert mx.array_equal(cpu_kernels.rms_norm(x, None, 1e-5), cpu_kernels._mlx_rms_norm(x, None, 1e-5))
    how = {"base": 10.0, "scale": 1.0, "offset": 3}
    assert cpu_kernels.rope(x.astype(dtype), 8, traditional=False, **how).dtype == dtype
    for of, traditional in ((x, True), (x[0], False)):
        expected = cpu_kernels._mlx_rope(of, 8, traditional=traditional, **how)
        assert mx.array_equal(cpu_kernels.rope(of, 8, traditional=traditional, **how), expected)
    # Its errors are mlx's too.
    with pytest.raises(ValueError, match="rope"):
        cpu_kernels.rope(x[:1], 8, traditional=False, base=10.0, scale=1.0, offset=mx.array([1, 2, 3]))
    with pytest.raises(ValueError, match="rms_norm"):
        cpu_kernels.rms_norm(x, weight[:1], 1e-5)
    halves = mx.exp(mx.random.uniform(0, 9, (4,))).astype(mx.bfloat16)
    expected = cpu_kernels._mlx_rope(x, 8, traditional=False, **how | {"base": None}, freqs=halves)
    ours = cpu_kernels.rope(x, 8, traditional=False, **how | {"base": None}, freqs=halves)
    assert mx.allclose(ours, expected, atol=1e-5)


def test_layers_that_rotate_alike_share_their_frequencies(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = mlx_lm_0_32.load(tmp_path)
    ropes = [layer.self_attn.rope for layer in model.layers]
    assert len(ropes) > 1 and all(rope._freqs is ropes[0]._freqs for rope in ropes)
    plain, _ = load_model(tmp_path)
    for one in (model, plain):
        one.set_dtype(mx.float32)
    tokens = mx.array([[1, 2, 3, 250]])
    assert mx.array_equal(model(tokens), plain(tokens))


def test_a_model_with_all_of_them_says_the_same(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(tiny_model)
    model.set_dtype(mx.float32)
    tokens = mx.array([[1, 2, 3, 250], [7, 8, 9, 10]])
    # An engine of another test may have replaced them.
    monkeypatch.setattr(mx.fast, "rope", cpu_kernels._mlx_rope)
    monkeypatch.setattr(mx.fast, "rms_norm", cpu_kernels._mlx_rms_norm)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", theirs)
    expected = model(tokens)
    mx.eval(expected)
    calls = []
    for name in ("rope", "rms_norm"):
        kernel = getattr(cpu_kernels, name)
        monkeypatch.setattr(mx.fast, name, lambda *of, kernel=kernel, name=name, **how: calls.append(name) or kernel(*of, **how))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", own)
    assert mx.allclose(model(tokens), expected, atol=1e-4) and {"rope", "rms_norm"} == set(calls)


def test_all_layers_of_a_step_share_their_angles(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(tiny_model)
    model.set_dtype(mx.float32)
    assert len(model.layers) > 1
    made = []
    angles = cpu_kernels._angles
    monkeypatch.setattr(cpu_kernels, "_angles", lambda *of: made.append(of[0]) or angles(*of))
    monkeypatch.setattr(mx.fast, "rope", cpu_kernels.rope)
    needs = [mlx_lm_0_32.RowNeeds(uid, 9, lambda logits: mx.argmax(logits, axis=-1)) for uid in range(2)]
    reading = mlx_lm_0_32.Reading(needs, mlx_lm_0_32.stops([]), model, [None, None], [[], []])
    reading.prompt([[1, 2, 3], [4, 5]])
    decoding = reading.decode([6, 7])
    for _ in range(3):
        decoding.step()
    assert made == [3, 1, 1, 1, 1]


def test_logsumexp_is_mlx_own() -> None:
    values = mx.random.normal((5, 3001)) * 40
    values[1, :3000] = -mx.inf
    assert mx.allclose(cpu_kernels.logsumexp(values), mx.logsumexp(values, axis=-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_lie_in_columns_and_are_the_same(tiny_model: Path, tmp_path: Path, tied: bool) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    model, config = load_model(tiny_model)
    config["tie_word_embeddings"] = tied
    save_model(tmp_path, type(model)(dataclasses.replace(model.args, tie_word_embeddings=tied)))
    save_config(config, tmp_path / "config.json")
    plain, _ = load_model(tmp_path)
    plain.set_dtype(mx.float32)
    made = load_weights(tmp_path, FLOAT32, lambda words: None)
    by_columns = {name for name, module in made.named_modules() if _first_stride(module) == 4}
    linear = {name for name, module in made.named_modules() if isinstance(module, nn.Linear)}
    assert linear and by_columns == linear | ({"model.embed_tokens"} if tied else set())
    for name, weight in tree_flatten(plain.parameters()):
        assert mx.array_equal(weight, dict(tree_flatten(made.parameters()))[name])
    tokens = mx.array([[1, 2, 3, 250]])
    assert mx.allclose(plain(tokens), made(tokens), atol=1e-4)


def _first_stride(module: nn.Module) -> int:
    """Bytes between the first rows' first numbers."""
    weight = module.get("weight")
    return memoryview(weight).strides[0] if isinstance(weight, mx.array) and weight.ndim == 2 else 0


# Every kernel that this program needs is compiled by one process with the flags and by one without.
COMPUTE = """
import sys
import mlx.core as mx
from mlx_lm.models.activations import swiglu
from worker.engines.cpu_kernels import _exp_less, _normal, _rotated
edges = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 88.5, -88.5, 1e-30, -1e-30, 3e38, -3e38]
values = mx.concatenate([mx.array(edges), mx.linspace(-30, 30, 4001)])
rows = mx.stack([values, values - 3, values * 2])
found = [swiglu(values, values + 1), _exp_less(rows, rows[:, 11:12]), _exp_less(rows, rows * 0.5)]
found += [_normal(4012, 1e-5)(rows, mx.array([[1.0], [1e5], [1e-9]]), values), _rotated(rows, rows - 1, rows * 2, rows)]
mx.save_safetensors(sys.argv[1], {str(number): one for number, one in enumerate(found)})
"""


def test_kernels_with_our_flags_compute_the_same(tmp_path: Path) -> None:
    made = device.cpu_environment(1, tmp_path)
    if "PATH" not in made:
        pytest.skip("no C++ compiler")
    results = []
    for name, environment in {"ours": made, "plain": made | {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}}.items():
        file = tmp_path / f"{name}.safetensors"
        subprocess.run([sys.executable, "-c", COMPUTE, str(file)], env={**os.environ, **environment}, check=True)
        results.append(mx.load(str(file)))
    for key, plain in results[1].items():
        ours = results[0][key]
        both = mx.isfinite(plain)
        assert mx.array_equal(mx.isnan(ours), mx.isnan(plain)) and mx.array_equal(mx.isinf(ours), mx.isinf(plain))
        error = mx.abs(ours - plain) / mx.maximum(mx.abs(plain), 1e-30)
        assert mx.where(both, error, 0.0).max().item() < 2e-6
    kernels = list(Path(made["TMPDIR"]).glob("mlx/*/cpu/lib*.so"))
    plain = list(tmp_path.glob("mlx/*/cpu/lib*.so"))
    assert len(kernels) == len(plain) >= 2
    # Vector instructions of which the plain ones have none; a machine without them has nothing to gain.
    if "avx2" in Path("/proc/cpuinfo").read_text():
        counts = [sum(path.read_bytes().count(b"\xc5\xfc") for path in paths) for paths in (kernels, plain)]
        assert counts[0] > 10 * max(1, counts[1]), counts


def test_another_cpu_gets_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = device.kernel_folder(tmp_path)
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **how: "flags : x\n" if path.name == "cpuinfo" else read(path, **how))
    assert device.kernel_folder(tmp_path) != here and device.kernel_folder(tmp_path).parent == here.parent


def test_a_compiler_that_does_not_know_the_flags_is_called_without(tmp_path: Path) -> None:
    (tmp_path / "g++").write_text('#!/bin/sh\n[ "$1" = -march=native ] && echo bad >&2 && exit 1\necho "plain $@"\n')
    (tmp_path / "g++").chmod(0o755)
    made = device.cpu_environment(1, tmp_path, {"PATH": str(tmp_path)})
    done = subprocess.run(["g++", "a b", "c"], env=made, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("plain a b c\n", "")
    # A worker's child finds the real compiler, not a chain of ours.
    again = device.cpu_environment(1, tmp_path, {"PATH": made["PATH"]})
    assert again["PATH"] == made["PATH"]
