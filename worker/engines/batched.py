"""The batched engine: continuous batching of one model on mlx-lm.

Owns the rows that wait for or are in the batch and what each needs: its text, its sampler, its grammar, its
log-probabilities. Must never know stop strings, sockets or processes. Invariant: every started row is in `_waiting`
or in `_rows`, and leaves with one Ended, or silently by cancel() and rebuild().

All calls come from one thread: mlx's streams and random state are thread-local.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from common.errors import ConfigError
from common.generation import GenerationRequest, Sampling, TokenLogprob
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended, EngineFacts, Prefilled, Step, Unsupported
from worker.engines import cpu_kernels, markup, sampling
from worker.engines.batch import Batch, Prompt
from worker.engines.company import Company
from worker.engines.costs import copied_per_s, read_well_together, weight_bytes
from worker.engines.grammar import BadGrammar, Grammars, RowGrammar
from worker.engines.logprobs import token_logprobs
from worker.engines.measure import measured
from worker.engines.mlx_lm_0_32 import RowNeeds, Token
from worker.engines.pace import Pace
from worker.engines.prompt_cache import PromptCache
from worker.engines.speculative import ABILITIES as SPECULATIVE_ABILITIES
from worker.engines.speculative import Draft, Speculation
from worker.engines.text import Texts, TextStream
from worker.engines.warm_up import warm_up
from worker.engines.weights import load_weights
from worker.placement import SPECULATIVE
from worker.plan import (
    AUTO, BUFFER_CACHE_SHARE, PROMPT_CACHE_SHARE, Fit, Needs, beside_bytes, fit, held_precision, needs, size,
)
from worker.reply_grammar import reply_grammar
from worker.tool_calls import read_offer

LANE = "batched"
ABILITIES = ("sampling", "seed", "penalties", "logit_bias", "logprobs", "grammar")

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
    grammar: RowGrammar | None
    uid: int
    tokens: np.ndarray

    @property
    def error(self) -> str:
        """The type name of what went wrong in one of its callables."""
        return next((part.error for part in (self.grammar, self.logits, self.sampler) if part and part.error), "")

    @property
    def needs(self) -> RowNeeds:
        """What the batch must know of it."""
        return RowNeeds(
            self.uid, self.request.max_tokens, self.sampler or sampling.greedy, [self.logits] if self.logits else [],
            self.grammar, self.request.top_logprobs >= 0,
        )  # fmt: skip


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
        prefill_step: int = 2048,
        prefill_batch: int = 8,
        cpu_weights: str = AUTO,
        memory_share: int = 0,
        prompt_cache_bytes: int = 0,
        decode_stall_s: float = 0.5,
        draft: Path | None = None,
        draft_tokens: int = 3,
        company_s: float = 0.0,
    ) -> None:
        """kv_tokens 0: slots x context. context 0: the model's own. memory_share: bytes this worker may use; 0: what
        is free now. prompt_cache_bytes 0: an eighth of that. decode_stall_s: how long reading may hold up decoding.
        draft: folder of a draft model, of which so many tokens are taken at a time; None: no speculation.
        company_s: how long a prompt waits for the next one while nothing runs."""
        self._folder = folder
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._context = context
        self._prefill_step = prefill_step
        self._prefill_batch = prefill_batch
        self._cpu_weights = cpu_weights
        self._memory_share = memory_share
        self._prompt_cache_bytes = prompt_cache_bytes
        self._decode_stall_s = decode_stall_s
        self._pace = Pace(decode_stall_s, prefill_step)
        self._company = Company(company_s)
        self._draft = draft
        self._draft_tokens = draft_tokens
        self._speculation: Speculation | None = None
        self._waiting: dict[RequestId, _Row] = {}
        self._rows: dict[int, _Row] = {}
        self._last_uid = 0
        self._steps = 0

    # --- Life ---------------------------------------------------------------------------------------------------------

    def load(self, progress: Callable[[str], None]) -> None:
        begun = time.monotonic()
        found = model_files.read(self._folder)
        self._texts = Texts(self._folder)
        self._stop_ids = found.eos_ids
        # An unseeded reply must not repeat in another worker or after a restart.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        cpu_kernels.prepare(progress)
        progress(f"reading {found.stored_bytes / 1e6:.0f} MB of weights")
        share = self._memory_share or device.available()
        precision = held_precision(self._cpu_weights, found, share, device.backend() == device.CPU)
        if self._memory_share:
            device.set_limits(share, share // BUFFER_CACHE_SHARE)
        before = device.memory()["active"]
        self._model: nn.Module | None = load_weights(self._folder, precision, progress)
        kv, self._vocabulary = measured(self._model)
        context = min(self._context or found.context, found.context)
        held = device.memory()["active"] - before
        draft, beside = None, 0
        if self._draft is not None:
            draft = Draft(self._draft, self._texts, self._vocabulary, precision, progress)
            beside = beside_bytes(model_files.read(self._draft), precision, context)
        need = Needs(held, needs(found, precision, self._slots, beside).overhead, kv)
        fitted = self._fitted(need, context, share, progress)
        self._candidates = sampling.CPU_CANDIDATES if device.backend() == device.CPU else 1 << 30
        self._kept = PromptCache(fitted.prompt_cache_bytes)
        per_token = kv.longest_token
        self._most_padding = weight_bytes(self._model) // max(per_token, 1)
        self._most_copied = int(self._decode_stall_s * copied_per_s() / max(per_token, 1))
        self._new_batch()
        self._grammars = Grammars(self._texts.tokenizer.to_str(), self._vocabulary, self._stop_ids)
        if draft is not None:
            self._speculation = self._speculate(draft)
        written = markup.read(self._folder, self._texts.tokenizer)
        self.facts = EngineFacts(
            slots=fitted.slots,
            kv_tokens=fitted.kv_tokens,
            block=1,
            context=context,
            lanes=(SPECULATIVE, LANE) if self._speculation else (LANE,),
            abilities=(
                *ABILITIES, *(("tools",) if written.parse else ()), *(("tool_choice",) if written.syntax else ()),
            ),
            details={
                "backend": device.backend(), "blas": device.blas_in_use(), "weights": precision, "model": found.kind,
            },  # fmt: skip
            markup=written,
            weight_bytes=need.weights,
            kv_bytes_per_token=per_token,
            lane_abilities={SPECULATIVE: SPECULATIVE_ABILITIES},
        )
        progress("warming up")
        warm_up(self)
        if self._speculation:
            self._speculation.warm_up()
        # Neither the warm-up's prompts nor its speed, kernels being compiled, are worth keeping.
        self._kept.clear()
        self._pace = Pace(self._decode_stall_s, self._prefill_step)
        progress(f"ready after {time.monotonic() - begun:.1f} s on {self.facts.details['blas']}")

    def _fitted(self, need: Needs, context: int, share: int, progress: Callable[[str], None]) -> Fit:
        """What the share holds, now that weights and caches are known and no longer read from headers."""
        if not self._memory_share:
            kept = self._prompt_cache_bytes or share // PROMPT_CACHE_SHARE
            return Fit(self._slots, self._kv_tokens or self._slots * context, kept)
        least = need.least(context)
        if least > share:
            raise ConfigError(
                f"loaded, this model needs {size(least)}, and the worker's share is {size(share)}: "
                f"{size(least - share)} too little; raise MILLPOND_MEMORY_BUDGET or lower MILLPOND_WORKERS"
            )
        fitted = fit(need, share, self._slots, context, self._prompt_cache_bytes)
        if self._kv_tokens:
            progress(f"room for {fitted.kv_tokens} KV tokens in {fitted.slots} slots; {self._kv_tokens} were planned")
        self._slots = fitted.slots
        return fitted

    def _speculate(self, draft: Draft) -> Speculation:
        return Speculation(
            self._model, draft, draft_tokens=self._draft_tokens, stop_ids=self._stop_ids, kept=self._kept,
            stall_s=self._decode_stall_s, prefill_step=self._prefill_step,
        )  # fmt: skip

    def rebuild(self) -> None:
        if self._speculation:
            self._speculation.drop()
        self._waiting.clear()
        self._company.left()
        self._rows.clear()
        # What broke the step may have been a lack of memory.
        self._kept.clear()
        self._new_batch()
        device.clear_cache()

    def close(self) -> None:
        self._speculation = None
        self._waiting.clear()
        self._rows.clear()
        self._kept.clear()
        self._batch = None
        self._model = None
        device.clear_cache()

    def memory(self) -> dict[str, int]:
        return device.memory()

    def _new_batch(self) -> None:
        # The old one first: its cache and the new one's need not fit side by side.
        self._batch: Batch | None = None
        self._batch = Batch(
            self._model, self._stop_ids, self._kept, self._most_padding, self._most_copied, self._decode_stall_s / 2
        )

    # --- Requests -----------------------------------------------------------------------------------------------------

    def lane_for(self, request: GenerationRequest) -> str:
        if not request.prompt:
            raise Unsupported("prompt: it has no token")
        # mlx checks no index: one past the end reads, or writes, beyond the array.
        for name, tokens in (("prompt", request.prompt), ("logit_bias", list(request.sampling.logit_bias))):
            if tokens and (min(tokens) < 0 or max(tokens) >= self._vocabulary):
                raise Unsupported(f"{name}: a token is not one of the model's {self._vocabulary}")
        # Only a request that finds the worker idle: see worker/engines/speculative.
        if self._speculation and not self.busy and self._speculation.takes(request):
            return SPECULATIVE
        return LANE

    def start(self, request_id: RequestId, request: GenerationRequest) -> None:
        if self.lane_for(request) == SPECULATIVE:
            assert self._speculation is not None
            self._speculation.start(request_id, request, self._texts.stream(), self._sampler(request))
            return
        text = reply_grammar(request, read_offer(request.tools), self.facts.markup, self._grammars.special)
        try:
            grammar = self._grammars.row(text) if text else None
        except BadGrammar as error:
            raise Unsupported(f"grammar: {error}") from None
        sampler = self._sampler(request)
        logits = None
        if sampling.changes_logits(request.sampling):
            logits = sampling.RowLogits(request.sampling, len(request.prompt))
        self._last_uid += 1
        self._waiting[request_id] = _Row(
            request_id, request, self._texts.stream(), sampler, logits, grammar, self._last_uid,
            np.asarray(request.prompt, np.int64),
        )  # fmt: skip
        self._company.came(time.monotonic(), self._pace.seconds(len(request.prompt)))

    def cancel(self, request_id: RequestId) -> None:
        if self._speculation and self._speculation.cancel(request_id):
            return
        if self._waiting.pop(request_id, None) is None:
            row = next((row for row in self._rows.values() if row.id == request_id), None)
            if row is not None:
                self._leave(row)
        elif not self._waiting:
            self._company.left()

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting or (self._speculation and self._speculation.busy))

    def due_in(self) -> float:
        speculates = self._speculation and self._speculation.busy
        if self._rows or not self._waiting or len(self._waiting) >= self._slots or speculates:
            return 0.0
        return self._company.due_in(time.monotonic())

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
        """Hand waiting rows to the batch, in company of their like: padding is read like tokens."""
        companies: list[list[Prompt]] = []
        for row in list(self._waiting.values())[: self._slots - len(self._rows)]:
            reading = [*self._batch.being_read, *chain.from_iterable(companies)]
            if any(self._batch.worth_waiting(row.tokens, other) for other in reading):
                continue
            del self._waiting[row.id]
            self._rows[row.uid] = row
            request = row.request
            cache, cached = self._kept.find(row.tokens)
            prompt = Prompt(row.needs, request.prompt, request.system_tokens, cache, cached, cached, row.tokens)
            for company in companies:
                if len(company) < self._prefill_batch and self._suits(company, prompt):
                    company.append(prompt)
                    break
            else:
                companies.append([prompt])
        for company in companies:
            self._batch.enter(company)

    def _suits(self, company: list[Prompt], prompt: Prompt) -> bool:
        """What they read and what they attend to are rectangles both."""
        together = [*company, prompt]
        whole = [len(one.tokens) for one in together]
        unread = [one.unread for one in together]
        return read_well_together(unread, self._prefill_step) and len(whole) * max(whole) <= 2 * sum(whole)

    def _leave(self, row: _Row) -> None:
        del self._rows[row.uid]
        self._batch.remove(row.uid)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[Step]:
        if self.due_in():
            return []
        steps = self._speculation.step(self._batch.decodes) if self._speculation else []
        begun = time.monotonic()
        self._company.left()
        self._join()
        if not self._rows:
            return steps
        steps += self._commit(self._batch.decode())
        if self._batch.reads:
            steps += self._read(begun)
        # What went wrong while the next token was drawn; the one committed above was drawn before.
        for row in [row for row in self._rows.values() if row.error]:
            self._leave(row)
            steps.append(Ended(row.id, "failed", error=row.error))
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CLEARS == 0 or not self._rows:
            device.clear_cache()
        return steps

    def _read(self, begun: float) -> list[Step]:
        """A stretch of the prompts that wait, as long as the step may still last."""
        allowed = self._pace.allowed(self._batch.decodes)
        read, progress = self._batch.read(allowed)
        self._pace.took(allowed, read, time.monotonic() - begun)
        return [Prefilled(self._rows[item.uid].id, item.done, item.total, item.cached) for item in progress]

    def _commit(self, tokens: list[Token]) -> list[Step]:
        shown = self._shown_logprobs(tokens)
        steps: list[Step] = []
        for item in tokens:
            row = self._rows[item.uid]
            if not item.sound:
                # Logits that are not finite give no error anywhere else.
                self._leave(row)
                steps.append(Ended(row.id, "failed", error="NonFiniteLogits"))
                continue
            if item.reason != "stop":
                steps.append(Committed(row.id, item.token, row.text.add(item.token), shown.get(item.uid)))
            # A grammar that is complete needs no end of sequence, and its last token may be the last one allowed.
            reason = "stop" if row.grammar and row.grammar.complete else item.reason
            if reason:
                self._leave(row)
                steps.append(Ended(row.id, reason, row.text.finish()))
        return steps

    def _shown_logprobs(self, tokens: list[Token]) -> dict[int, TokenLogprob]:
        """For the rows that asked, from the distribution before penalties, grammar and temperature."""
        asked = [(item, item.logprobs) for item in tokens if item.logprobs is not None]
        if not asked:
            return {}
        counts = [self._rows[item.uid].request.top_logprobs for item, _ in asked]
        arrays = mx.stack([logprobs for _, logprobs in asked])
        found = token_logprobs(self._texts, arrays, [item.token for item, _ in asked], counts)
        return {item.uid: logprob for (item, _), logprob in zip(asked, found, strict=True)}
