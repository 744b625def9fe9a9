"""Block diffusion: DiffusionGemma through mlx-vlm, as a TextGenerator.

Owns the model, its denoising settings and a reply's random numbers. The only module that may import mlx-vlm, and only when
such a model is loaded: the library is an extra and takes seconds to import. Must never know requests. Invariant: mlx's
global random state is, between two blocks, what it would be without this reply.

A canvas of up to 256 positions is denoised as a whole, then its tokens are committed in order. The text is made by our own
machine (worker/engines/text), which mlx-vlm takes for its detokenizer.
"""

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from common.errors import ConfigError
from worker import device, model_files
from worker.engines import cpu_kernels
from worker.engines.serial import Progress
from worker.engines.text import Texts, TextStream
from worker.generators import Block, TextGeneration
from worker.plan import AUTO, FLOAT32, KEEP, held_precision

VERSION = "0.7.10"
CONFIDENCE, ENTROPY = "confidence-threshold", "entropy-bound"
THOUGHT_OPENS, THOUGHT_CLOSES = "<|channel>thought\n", "<channel|>"


@dataclass(frozen=True)
class Denoising:
    """How a canvas is denoised. steps 0, canvas 0: the model's own. threshold: with the confidence sampler, how sure a
    position must be to be kept."""

    steps: int = 0
    threshold: float = 0.9
    canvas: int = 0
    sampler: str = CONFIDENCE


class DiffusionGemma:
    """A TextGenerator; see worker/generators.py for what each method promises."""

    # Nothing of a sampling request: what is kept of a canvas is the most likely token everywhere.
    abilities = ("seed",)

    def __init__(
        self,
        folder: Path,
        texts: Texts,
        progress: Progress,
        *,
        denoising: Denoising = Denoising(),
        context: int = 0,
        prefill_step: int = 2048,
        cpu_weights: str = AUTO,
        memory_share: int = 0,
    ) -> None:
        """Load the model. Raises ConfigError when mlx-vlm is not installed, or cannot load it."""
        self._stream_blocks, load_model = _library(folder)
        self._denoising = denoising
        self._prefill_step = prefill_step
        found = model_files.read(folder)
        share = memory_share or device.available()
        if memory_share:
            device.set_limits(memory_share, memory_share // 16)
        # An unseeded reply must not repeat in another worker or after a restart.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        cpu_kernels.prepare(progress)
        progress(f"reading {found.stored_bytes / 1e6:.0f} MB of weights")
        try:
            self._model = load_model(folder, lazy=True)
            precision = _held(self._model, held_precision(cpu_weights, found, share, device.backend() == device.CPU))
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, ImportError) as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(f"mlx-vlm cannot load {folder}: {type(error).__name__}: {text}") from error
        self._decoder = _Decoder(texts)
        config = self._model.config
        self.vocabulary = int(config.text_config.vocab_size)
        self.block = min(denoising.canvas or config.canvas_length, config.canvas_length)
        self.max_prompt_tokens = max(1, min(context or found.context, found.context) - 1)
        self.details = {"weights": precision, "canvas": str(self.block), "sampler": denoising.sampler}
        vocabulary = texts.tokenizer.get_vocab()
        thinks = all(marker in vocabulary for marker in ("<|channel>", THOUGHT_CLOSES))
        self.thought_channel_marker_ids: tuple[Sequence[int], Sequence[int]] = (
            texts.tokenizer.encode(THOUGHT_OPENS if thinks else "", add_special_tokens=False).ids,
            texts.tokenizer.encode(THOUGHT_CLOSES if thinks else "", add_special_tokens=False).ids,
        )

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_ids: Sequence[int],
        skip_special_token_ids: Collection[int],
        seed: int | None,
    ) -> Iterator[Block]:
        results = self._stream_blocks(
            self._model,
            self._decoder.as_processor(),
            _Stops(stop_ids),
            mx.array([list(prompt)]),
            None,
            None,
            max_tokens=max_tokens,
            skip_special_token_ids=frozenset(skip_special_token_ids),
            max_denoising_steps=self._denoising.steps or None,
            diffusion_max_canvas_length=self.block,
            diffusion_sampler=self._denoising.sampler,
            diffusion_threshold=self._denoising.threshold,
            prefill_step_size=self._prefill_step,
        )
        random = _Random(seed)
        try:
            while True:
                with random:
                    block = _next_block(results)
                if block is None:
                    return
                yield block
        finally:
            results.close()


def _next_block(results: Iterable[Any]) -> Block | None:
    """What the generator gives until a canvas is through, or the reply; None: it is over."""
    tokens: list[tuple[int, str]] = []
    for result in results:
        if result.finish_reason is not None:
            return Block(tokens, TextGeneration(result.finish_reason, result.text))
        if result.diffusion_block_complete:
            return Block(tokens)
        tokens.append((result.token, result.text))
    return None


class _Random(contextlib.AbstractContextManager["_Random"]):
    """Random numbers of one reply's own, entered once per block; without a seed everybody's."""

    def __init__(self, seed: int | None) -> None:
        self._state = seed
        self._others = 0

    def __enter__(self) -> "_Random":
        if self._state is not None:
            self._others = _random_state()
            mx.random.seed(self._state)
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state = _random_state()
            mx.random.seed(self._others)


def _random_state() -> int:
    """mlx's state as the seed that would lead to it."""
    (key,) = mx.random.state
    high, low = key.tolist()
    return (high << 32) | low


class _Decoder:
    """Our text machine, as mlx-vlm's detokenizer: it takes a shallow copy for each reply and resets that."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._stream: TextStream
        self.last_segment = ""

    def as_processor(self) -> Any:
        """What has a detokenizer."""
        return _Processor(self)

    def reset(self) -> None:
        self._stream = self._texts.stream()
        self.last_segment = ""

    def add_token(self, token: int, skip_special_token_ids: Collection[int] = ()) -> None:
        self.last_segment = "" if token in skip_special_token_ids else self._stream.add(token)

    def finalize(self) -> None:
        self.last_segment = self._stream.finish()


@dataclass(frozen=True)
class _Processor:
    """mlx-vlm's processor, as far as it is looked at."""

    detokenizer: _Decoder


class _Stops:
    """mlx-vlm's tokenizer and its stopping criteria in one, as far as they are looked at."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = set(ids)

    @property
    def stopping_criteria(self) -> "_Stops":
        return self

    def __call__(self, token: int) -> bool:
        return token in self._ids

    def add_eos_token_ids(self, ids: int | Iterable[int]) -> None:
        """The generation config's own; model_files has found them already."""
        self._ids |= {ids} if isinstance(ids, int) else set(ids)


def _library(folder: Path) -> tuple[Any, Any]:
    """(stream_diffusion_generate, load_model) of mlx-vlm."""
    try:
        # Here and not above: it is not there without the extra, and costs seconds where it is not used.
        from mlx_vlm.generate.diffusion import stream_diffusion_generate
        from mlx_vlm.utils import load_model
    except ImportError as error:
        reason = "" if (error.name or "").partition(".")[0] == "mlx_vlm" else f" ({error})"
        raise ConfigError(
            f"{folder} is a block-diffusion model, which needs the extra diffusion{reason}: in Millpond's folder run "
            f"{sys.executable} -m pip install -e '.[diffusion]'"
        ) from None
    return stream_diffusion_generate, load_model


def _held(model: nn.Module, precision: str) -> str:
    """Evaluate the weights; (float32 or keep) as they are held. Packed ones stay: the experts have no unpacked form."""
    names = [name for name, _ in tree_flatten(model.parameters())]
    if precision == FLOAT32 and not any(name.endswith(".scales") for name in names):
        model.set_dtype(mx.float32)
    else:
        precision = KEEP
    # One at a time, so that stored and converted ones do not lie side by side for the whole model.
    for _, weight in tree_flatten(model.parameters()):
        mx.eval(weight)
    device.clear_cache()
    return precision
