"""Speculative decoding: a small draft model proposes tokens, and the model checks a handful of them in one pass.

Owns the draft model and the one reply that is made so, from its prompt to its end. Must never know the batch, sockets or
processes. Invariant: every token is one that the model itself drew; the draft only decides how many come of a pass.

It pays while the worker is idle: a pass over several positions of one row costs little more than over one, while a
batch has its rows to fill it. So the lane takes a request only when nothing else runs. One that comes later joins the
batch at once, and both go on step by step; moving the row into the batch would copy its cache to save part of a
reply's time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from common.errors import ConfigError
from common.generation import GenerationRequest, Sampling
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended, Prefilled, Step
from worker.engines import mlx_lm_0_32, sampling
from worker.engines.mlx_lm_0_32 import Cache, Round
from worker.engines.pace import Pace
from worker.engines.prompt_cache import PromptCache
from worker.engines.text import Texts, TextStream
from worker.engines.weights import load_weights
from worker.placement import shape_of

# Not seeds, because a reply must not depend on whether the worker was idle when it began; nor what changes logits by the
# tokens before, which the draft's pass and the model's do not have in common.
ABILITIES = ("sampling",)

WARM_UP_TOKENS = 8


class Draft:
    """The draft model: callable as mlx-lm calls one, for token ids of the model that it drafts for."""

    def __init__(self, folder: Path, texts: Texts, vocabulary: int, precision: str, progress: Callable[[str], None]) -> None:
        """texts, vocabulary: the model's. Raises ConfigError for a folder that is no model, or whose tokens are others."""
        found = model_files.read(folder)
        _check_tokens(folder, Texts(folder).tokenizer, texts.tokenizer)
        progress(f"reading {found.stored_bytes / 1e6:.0f} MB of the draft model's weights")
        self.model = load_weights(folder, precision, progress)
        self.context = found.context
        self._own = self.model(mx.array([[0]])).shape[-1]
        self._shared = min(self._own, vocabulary)

    def __call__(self, tokens: mx.array, cache: Cache) -> mx.array:
        # The two may be padded to different sizes; mlx checks no index.
        return self.model(mx.minimum(tokens, self._own - 1), cache=cache)[..., : self._shared]


@dataclass(eq=False)
class _Row:
    """The reply in the making. read, draft_read: tokens of the prompt that each model's cache holds."""

    id: RequestId
    request: GenerationRequest
    text: TextStream
    sampler: sampling.Draw | None
    cache: Cache
    draft_cache: Cache
    read: int
    draft_read: int = 0
    cached: int = 0
    rounds: Iterator[Round] | None = None
    given: int = 0
    accepted: int = 0
    rejected: int = 0
    head: list[int] = field(default_factory=list)


class Speculation:
    """The lane serial+spec of a batched worker. All calls from the thread that loaded the models."""

    def __init__(
        self, model: nn.Module, draft: Draft, *, draft_tokens: int, stop_ids: Sequence[int], kept: PromptCache,
        stall_s: float, prefill_step: int,
    ) -> None:  # fmt: skip
        """draft_tokens: proposed in a round at most. kept: the model's prompt cache. Raises ConfigError for models whose
        caches cannot be cut back to what was accepted."""
        for name, one in (("the model", model), ("the draft model", draft.model)):
            if not mlx_lm_0_32.can_be_cut(one):
                raise ConfigError(f"speculative decoding: the cache of {name} cannot be cut back; leave out --draft-model")
        self._model = model
        self._draft = draft
        self._draft_tokens = draft_tokens
        self._stop_ids = frozenset(stop_ids)
        self._kept = kept
        self._pace = Pace(stall_s, prefill_step)
        self._row: _Row | None = None

    @property
    def busy(self) -> bool:
        """Whether a reply is in the making."""
        return self._row is not None

    def takes(self, request: GenerationRequest) -> bool:
        """Whether this lane can honour all of it. Raises ProtocolError for tools that are none."""
        shape = shape_of(request)
        room = self._draft.context - shape.prompt_tokens - shape.max_tokens
        return room >= 0 and set(shape.needs) <= {*ABILITIES, "tools"}

    def start(self, id: RequestId, request: GenerationRequest, text: TextStream, sampler: sampling.Draw | None) -> None:
        """Take a request; there must be none. sampler None: greedy."""
        assert self._row is None
        cache, cached = self._kept.find(request.prompt)
        self._row = _Row(
            id, request, text, sampler,
            cache=cache if cache is not None else mlx_lm_0_32.new_cache(self._model),
            draft_cache=mlx_lm_0_32.new_cache(self._draft.model),
            read=cached, cached=cached, head=request.prompt[:-1],
        )  # fmt: skip

    def cancel(self, id: RequestId) -> bool:
        """Whether it was this lane's reply; it is dropped then."""
        mine = self._row is not None and self._row.id == id
        if mine:
            self.drop()
        return mine

    def drop(self) -> None:
        """Forget the reply, if there is one."""
        row, self._row = self._row, None
        if row is not None and row.rounds is not None:
            # Not left to the garbage collector: it holds both caches.
            row.rounds.close()  # type: ignore[attr-defined]

    def step(self, others_wait: bool) -> list[Step]:
        """A stretch of the prompt, or a round. others_wait: rows of the batch decode between the steps."""
        row = self._row
        if row is None:
            return []
        if row.rounds is None:
            return self._read(row, others_wait)
        return self._commit(row, next(row.rounds))

    def warm_up(self) -> None:
        """Run what a reply will run, so that none waits for a kernel."""
        greedy = GenerationRequest([0] * 3, WARM_UP_TOKENS, Sampling(temperature=0.0))
        self.start(RequestId(bytes(16)), greedy, _NoText(), None)
        while self.busy:
            self.step(False)

    def _read(self, row: _Row, others_wait: bool) -> list[Step]:
        begun = time.monotonic()
        allowed = self._pace.allowed(others_wait)
        chunks = [
            (self._draft, row.draft_cache, row.head[row.draft_read : row.draft_read + allowed]),
            (self._model, row.cache, row.head[row.read : row.read + allowed]),
        ]
        for model, cache, tokens in chunks:
            if tokens:
                model(mx.array([tokens]), cache=cache)
                mlx_lm_0_32.evaluate(cache)
        row.draft_read += len(chunks[0][2])
        row.read += len(chunks[1][2])
        self._pace.took(allowed, max(len(tokens) for _, _, tokens in chunks), time.monotonic() - begun)
        if row.read + row.draft_read == 2 * len(row.head):
            self._begin_rounds(row)
        total = len(row.request.prompt)
        done = min(row.read, row.draft_read)
        return [Prefilled(row.id, total if row.rounds is not None else done, total, row.cached)]

    def _begin_rounds(self, row: _Row) -> None:
        if self._kept.wants(row.head):
            # A copy: the row's own grows, and is cut back, from here on.
            self._kept.put(row.head, deepcopy(row.cache))
        row.rounds = mlx_lm_0_32.speculate(
            self._model, self._draft, row.request.prompt[-1], [*row.cache, *row.draft_cache], self._draft_tokens,
            row.request.max_tokens, row.sampler or sampling.greedy,
        )  # fmt: skip

    def _commit(self, row: _Row, round: Round) -> list[Step]:
        if not round.sound or (row.sampler and row.sampler.error):
            error = row.sampler.error if row.sampler and row.sampler.error else "NonFiniteLogits"
            return self._ended(row, "failed", error=error)
        steps: list[Step] = []
        for place, (token, drafted) in enumerate(round.tokens):
            if token in self._stop_ids:
                return [*steps, *self._ended(row, "stop", row.text.finish())]
            row.given += 1
            row.accepted += drafted
            last = place == len(round.tokens) - 1
            row.rejected += round.rejected if last else 0
            steps.append(
                Committed(
                    row.id, token, row.text.add(token), from_draft=drafted,
                    rejected_drafts=round.rejected if last else 0,
                )  # fmt: skip
            )
        if row.given >= row.request.max_tokens:
            steps += self._ended(row, "length", row.text.finish())
        return steps

    def _ended(self, row: _Row, reason: str, text: str = "", error: str = "") -> list[Step]:
        self.drop()
        device.clear_cache()
        return [
            Ended(
                row.id, reason, text, error,
                accepted_draft_tokens=row.accepted, rejected_draft_tokens=row.rejected,
            )  # fmt: skip
        ]


class _NoText:
    """The text of a reply that nobody reads."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _check_tokens(folder: Path, draft: Tokenizer, model: Tokenizer) -> None:
    """One may know tokens that the other does not, but no id may mean two things. Raises ConfigError."""
    known = {id: token for token, id in model.get_vocab().items()}
    for token, id in sorted(draft.get_vocab().items(), key=lambda one: one[1]):
        if known.get(id, token) != token:
            raise ConfigError(
                f"the draft model {folder} has another vocabulary: its token {id} is {token!r}, the model's {known[id]!r}; "
                "take a smaller model of the same family"
            )
