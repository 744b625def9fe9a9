"""The batched engine: continuous batching of one model with mlx-lm's BatchGenerator.

Owns the rows that wait for or are in the batch and what each needs: its text, its sampler, its log-probabilities.
Must never know stop strings, sockets or processes. Invariant: every started row is in `_waiting` or in `_rows`, and
leaves with one Ended, or silently by cancel() and rebuild().

All calls come from one thread: mlx's streams and random state are thread-local.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from common.generation import GenerationRequest, Sampling, TokenLogprob
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended, EngineFacts, Prefilled, Step, Unsupported
from worker.engines import mlx_lm_0_32, sampling
from worker.engines.logprobs import token_logprobs
from worker.engines.text import Texts, TextStream
from worker.engines.warm_up import warm_up
from worker.engines.weights import load_weights
from worker.plan import AUTO, held_precision

LANE = "batched"
ABILITIES = ("sampling", "seed", "penalties", "logit_bias", "logprobs")

# Buffers of shapes that no longer occur pile up in mlx's cache; clearing costs a new allocation or two.
STEPS_BETWEEN_CLEARS = 256


@dataclass
class _Row:
    """One request in the batch."""

    id: RequestId
    request: GenerationRequest
    text: TextStream
    sampler: sampling.Draw | None
    logits: sampling.RowLogits | None
    unread: int
    uid: int = -1

    @property
    def error(self) -> str:
        """The type name of what went wrong in one of its callables."""
        return (self.logits.error if self.logits else "") or (self.sampler.error if self.sampler else "")


class BatchedEngine:
    """Engine on mlx-lm; see worker/engine.py for what each method promises."""

    facts: EngineFacts

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 16,
        kv_tokens: int = 0,
        context: int = 0,
        prefill_step: int = 256,
        prefill_batch: int = 8,
        cpu_weights: str = AUTO,
        memory_share: int = 0,
    ) -> None:
        """kv_tokens 0: slots x context. context 0: the model's own. memory_share: bytes this worker may use; 0: what
        is free now."""
        self._folder = folder
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._context = context
        self._prefill_step = prefill_step
        self._prefill_batch = prefill_batch
        self._cpu_weights = cpu_weights
        self._memory_share = memory_share
        self._waiting: dict[RequestId, _Row] = {}
        self._rows: dict[int, _Row] = {}
        self._steps = 0

    # --- Life ---------------------------------------------------------------------------------------------------------

    def load(self, progress: Callable[[str], None]) -> None:
        begun = time.monotonic()
        found = model_files.read(self._folder)
        self._texts = Texts(self._folder)
        self._stop_ids = found.eos_ids
        # An unseeded reply must not repeat in another worker or after a restart.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        no_kernels = device.ensure_kernels_compile()
        if no_kernels:
            progress(f"running without compiled kernels: {no_kernels}")
        progress(f"reading {found.stored_bytes / 1e6:.0f} MB of weights")
        share = self._memory_share or device.available()
        precision = held_precision(self._cpu_weights, found, share, device.backend() == device.CPU)
        if self._memory_share:
            device.set_limits(share, share // 16)
        self._model: nn.Module | None = load_weights(self._folder, precision, progress)
        self._candidates = sampling.CPU_CANDIDATES if device.backend() == device.CPU else 1 << 30
        self._new_batch()
        self._vocabulary = self._measure_vocabulary()
        context = min(self._context or found.context, found.context)
        self.facts = EngineFacts(
            slots=self._slots,
            kv_tokens=self._kv_tokens or self._slots * context,
            block=1,
            context=context,
            lanes=(LANE,),
            abilities=ABILITIES,
            details={
                "backend": device.backend(), "blas": device.blas_in_use(), "weights": precision, "model": found.kind,
            },  # fmt: skip
        )
        progress("warming up")
        warm_up(self)
        progress(f"ready after {time.monotonic() - begun:.1f} s on {self.facts.details['blas']}")

    def rebuild(self) -> None:
        self._waiting.clear()
        self._rows.clear()
        self._new_batch()
        device.clear_cache()

    def close(self) -> None:
        self._waiting.clear()
        self._rows.clear()
        self._batch = None
        self._model = None
        device.clear_cache()

    def memory(self) -> dict[str, int]:
        return device.memory()

    def _new_batch(self) -> None:
        # The old one first: its cache and the new one's need not fit side by side.
        self._batch: mlx_lm_0_32.Batch | None = None
        self._batch = mlx_lm_0_32.Batch(
            self._model, self._slots, self._prefill_step, self._prefill_batch, self._stop_ids
        )

    # --- Requests -----------------------------------------------------------------------------------------------------

    def lane_for(self, request: GenerationRequest) -> str:
        for need in ("grammar", "tools"):
            if getattr(request, need):
                raise Unsupported(f"{need}: this engine cannot honour it")
        if not request.prompt:
            raise Unsupported("prompt: it has no token")
        # mlx checks no index: one past the end reads, or writes, beyond the array.
        for name, tokens in (("prompt", request.prompt), ("logit_bias", list(request.sampling.logit_bias))):
            if tokens and (min(tokens) < 0 or max(tokens) >= self._vocabulary):
                raise Unsupported(f"{name}: a token is not one of the model's {self._vocabulary}")
        return LANE

    def start(self, request_id: RequestId, request: GenerationRequest) -> None:
        self.lane_for(request)
        sampler = self._sampler(request)
        logits = None
        if sampling.changes_logits(request.sampling):
            logits = sampling.RowLogits(request.sampling, len(request.prompt), keep_raw=request.top_logprobs >= 0)
        self._waiting[request_id] = _Row(
            request_id, request, self._texts.stream(), sampler, logits, unread=len(request.prompt)
        )

    def cancel(self, request_id: RequestId) -> None:
        if self._waiting.pop(request_id, None) is None:
            row = next((row for row in self._rows.values() if row.id == request_id), None)
            if row is not None:
                self._leave(row)

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    def due_in(self) -> float:
        return 0.0

    def _sampler(self, request: GenerationRequest) -> sampling.Draw | None:
        """None: greedy."""
        if sampling.is_greedy(request.sampling):
            return None
        if request.sampling.seed is not None:
            return sampling.SeededDraw(request.sampling, self._candidates, request.choice)
        return self._shared_draw(request.sampling)

    def _shared_draw(self, wanted: Sampling) -> sampling.Draw:
        """One object for all rows of equal settings; none is kept past the rows that use it."""
        key = Sampling(wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p)
        for row in (*self._rows.values(), *self._waiting.values()):
            if type(row.sampler) is sampling.Draw and row.sampler.settings == key and not row.sampler.error:
                return row.sampler
        return sampling.Draw(key, self._candidates)

    def _join(self) -> None:
        """Hand waiting rows to the batch as far as their prompts go well together."""
        reading = [row.unread for row in self._rows.values() if row.unread]
        for row in list(self._waiting.values()):
            if len(self._rows) >= self._slots or len(reading) >= self._prefill_batch:
                return
            # In order of arrival, but a short prompt need not wait behind one that does not go with those being read.
            if read_well_together([*reading, row.unread], self._prefill_step):
                reading.append(row.unread)
                self._enter(row)

    def _enter(self, row: _Row) -> None:
        del self._waiting[row.id]
        request = row.request
        row.uid = self._batch.insert(
            request.prompt, request.max_tokens, row.sampler or sampling.greedy, [row.logits] if row.logits else []
        )
        self._rows[row.uid] = row

    def _leave(self, row: _Row) -> None:
        del self._rows[row.uid]
        self._batch.remove(row.uid)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[Step]:
        self._join()
        if not self._rows:
            return []
        prompts, tokens = self._batch.step()
        steps: list[Step] = []
        for item in prompts:
            row = self._rows[item.uid]
            row.unread = item.total - item.done
            steps.append(Prefilled(row.id, item.done, item.total))
        steps += self._commit(tokens)
        # What went wrong while the next token was drawn; the one committed above was drawn before.
        for row in [row for row in self._rows.values() if row.error]:
            self._leave(row)
            steps.append(Ended(row.id, "failed", error=row.error))
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CLEARS == 0 or not self._rows:
            device.clear_cache()
        return steps

    def _commit(self, tokens: list[mlx_lm_0_32.Token]) -> list[Step]:
        if not tokens:
            return []
        with mx.stream(self._batch.stream):
            # One number a row and one wait for all: logits that are not finite give no error anywhere else.
            chosen = mx.stack([item.logprobs[item.token] for item in tokens])
            finite = mx.isfinite(chosen).tolist()
            shown = self._shown_logprobs(tokens)
        steps: list[Step] = []
        for item, sound in zip(tokens, finite, strict=True):
            row = self._rows[item.uid]
            if not sound:
                self._leave(row)
                steps.append(Ended(row.id, "failed", error="NonFiniteLogits"))
                continue
            if item.reason != "stop":
                steps.append(Committed(row.id, item.token, row.text.add(item.token), shown.get(item.uid)))
            if item.reason:
                self._leave(row)
                steps.append(Ended(row.id, item.reason, row.text.finish()))
        return steps

    def _shown_logprobs(self, tokens: list[mlx_lm_0_32.Token]) -> dict[int, TokenLogprob]:
        """For the rows that asked, from the distribution before penalties and temperature."""
        asked, arrays = [], []
        for item in tokens:
            row = self._rows[item.uid]
            if row.request.top_logprobs >= 0:
                asked.append(item)
                arrays.append(row.logits.raw.popleft()[0] if row.logits else item.logprobs)
        if not asked:
            return {}
        counts = [self._rows[item.uid].request.top_logprobs for item in asked]
        found = token_logprobs(self._texts, mx.stack(arrays), [item.token for item in asked], counts)
        return {item.uid: logprob for item, logprob in zip(asked, found, strict=True)}

    def _measure_vocabulary(self) -> int:
        """The model's own number of tokens, which is often more than the tokenizer knows."""
        return self._model(mx.array([[0]])).shape[-1]


def read_well_together(unread: list[int], step: int) -> bool:
    """Whether prompts with so many tokens left may be read as one rectangle of at most `step` columns.

    No more than half of it may be padding, and no more than two steps' work: the rows that decode wait for it.
    """
    chunks = [min(length, step) for length in unread]
    area = len(chunks) * max(chunks)
    return area <= 2 * step and area <= 2 * sum(chunks)
