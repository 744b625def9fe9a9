"""The rows of one model on their way: which prompts are read next and how far, and which rows decode together.

Owns the order of reading, the groups that decode, and the snapshots for the prompt cache. Must never know requests,
text or sampling. Invariant: a row is in exactly one place, being read with its company or decoding in one group,
until it ends or is removed; neither changes another row's tokens.

mlx-lm's caches are rectangles: rows times the longest. So prompts are read in company of their like, and rows of very
unlike length decode in groups of their own, where reading the weights once more costs less than the padding.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.nn as nn
import numpy as np

from worker.engines import mlx_lm_0_32
from worker.engines.mlx_lm_0_32 import Cache, Decoding, Reading, RowNeeds, Token
from worker.engines.prompt_cache import PromptCache, common

# So many tokens another row must be reading already: the time of a step or two.
WORTH_WAITING = 64

# Each group reads all weights in every step.
MOST_GROUPS = 3


@dataclass(frozen=True)
class Progress:
    """A stretch of a prompt was read: done of total, cached of them not by us. All of it: the row decodes now."""

    uid: int
    done: int
    total: int
    cached: int


@dataclass(eq=False)
class Prompt:
    """A row to be read. shared: where the head ends that other prompts begin with too; 0: not known. cache: of the
    first `done` tokens. array: the tokens again, (n,) of int64, for comparing with others."""

    needs: RowNeeds
    tokens: list[int]
    shared: int = 0
    cache: Cache | None = None
    done: int = 0
    cached: int = 0
    array: np.ndarray | None = None

    @property
    def unread(self) -> int:
        """All but the last token, which is the first step's input."""
        return len(self.tokens) - 1 - self.done

    def progress(self) -> Progress:
        """How far it is."""
        total = len(self.tokens)
        return Progress(self.needs.uid, self.done if self.unread else total, total, self.cached)

    def chunk(self, most: int, stop_at_shared: bool) -> list[int]:
        """The next tokens to read."""
        end = self.done + min(most, self.unread)
        if stop_at_shared and self.done < self.shared < end:
            end = self.shared
        return self.tokens[self.done : end]


@dataclass(eq=False)
class _Keeping:
    """A row's snapshot for the prompt cache on its way: these layers of it are not copied yet."""

    tokens: list[int]
    cache: Cache
    uncopied: Cache


@dataclass(eq=False)
class _Company:
    """Prompts that are read as one rectangle, in the order of its rows. keeping: what is to be copied before they are
    read on."""

    reading: Reading
    prompts: list[Prompt]
    keeping: deque[_Keeping] = field(default_factory=deque)

    @property
    def unread(self) -> int:
        return max(prompt.unread for prompt in self.prompts)


class Batch:
    """Continuous batching: rows join and leave between steps. All calls from the thread that loaded the model."""

    def __init__(
        self, model: nn.Module, stop_ids: Sequence[int], kept: PromptCache, most_padding: int, most_copied: int,
        most_moved_s: float,
    ) -> None:  # fmt: skip
        """most_padding: how many tokens of padding cost a step as much as reading the weights once more. most_copied:
        how many tokens' caches can be copied while rows wait for it. most_moved_s: how long a prompt's own cache may be
        moved in one step that rows wait for."""
        self._model = model
        self._stops = mlx_lm_0_32.stops(stop_ids)
        self._kept = kept
        self._most_padding = most_padding
        self._most_copied = most_copied
        self._most_moved_s = most_moved_s
        # A cache that can be cut back serves any prefix; of others one is kept where the shared head ends.
        self._stop_at_shared = not mlx_lm_0_32.can_be_cut(model)
        self._reading: list[_Company] = []
        self._groups: list[Decoding] = []

    # --- Rows ---------------------------------------------------------------------------------------------------------

    def enter(self, prompts: list[Prompt]) -> None:
        """New rows, to be read together."""
        reading = Reading(
            [prompt.needs for prompt in prompts],
            self._stops,
            self._model,
            [prompt.cache for prompt in prompts],
            [prompt.tokens[: prompt.done] for prompt in prompts],
        )
        for prompt in prompts:
            prompt.cache = None
        self._reading.append(_Company(reading, list(prompts)))

    def remove(self, uid: int) -> None:
        """Take a row out wherever it is; unknown uids are fine."""
        for company in self._reading:
            keep = [row for row, prompt in enumerate(company.prompts) if prompt.needs.uid != uid]
            if len(keep) < len(company.prompts):
                company.reading.filter(keep)
                company.prompts = [company.prompts[row] for row in keep]
        self._reading = [company for company in self._reading if company.prompts]
        for group in self._groups:
            if uid in group.uids:
                group.remove(uid)
        self._tidy()

    @property
    def reads(self) -> bool:
        """Whether prompts wait to be read."""
        return bool(self._reading)

    @property
    def decodes(self) -> bool:
        """Whether rows draw tokens."""
        return bool(self._groups)

    @property
    def being_read(self) -> list[Prompt]:
        """The prompts that are not through."""
        return [prompt for company in self._reading for prompt in company.prompts]

    def worth_waiting(self, tokens: np.ndarray, other: Prompt) -> bool:
        """Whether a prompt should wait until `other` is read, because then much of it need not be read again."""
        if other.array is None or not self._kept.wants(other.array[:-1]):
            return False
        same = common(tokens, other.array)
        if self._stop_at_shared:
            same, left = (other.shared, other.shared - other.done) if same >= other.shared else (0, 0)
        else:
            same, left = min(same, len(tokens) - 1), other.unread
        saved = same - self._kept.covers(tokens)
        if left <= 0 and not any(other in company.prompts for company in self._reading if company.keeping):
            return False
        return saved >= WORTH_WAITING and left <= 2 * saved

    # --- Steps --------------------------------------------------------------------------------------------------------

    def decode(self) -> list[Token]:
        """One token of every row that decodes."""
        tokens = [token for group in self._groups for token in group.step()]
        self._tidy()
        return tokens

    def read(self, most: int) -> tuple[int, list[Progress]]:
        """Read about so many tokens of prompts: (how many it was, padding included; how far each row is)."""
        if not self._reading:
            return 0, []
        # The oldest always moves on; a short one need not wait until it is through.
        oldest, shortest = self._reading[0], min(self._reading, key=lambda company: company.unread)
        chosen = [oldest] if oldest is shortest else [shortest, oldest]
        read, progress = 0, []
        if any(company.keeping or company.reading.lacks_room(company.unread) for company in chosen):
            # Their step is on its way, and what is moved waits for it.
            for group in self._groups:
                group.wait()
        # Not by the number of bytes: memory that is new to a virtual machine is filled ten times as slowly as other.
        until = time.monotonic() + self._most_moved_s if self.decodes else math.inf
        for company in chosen:
            area, steps = self._read(company, most // len(chosen), until)
            read += area
            progress += steps
        self._reading = [company for company in self._reading if company.prompts]
        return read, progress

    def _read(self, company: _Company, most: int, until: float) -> tuple[int, list[Progress]]:
        """until: when a step that rows wait for takes up nothing more."""
        prompts, reading = company.prompts, company.reading
        area = 0
        if not company.keeping:
            columns = self._columns(company, max(1, most // len(prompts)), until)
            if not columns:
                return 0, []
            chunks = [prompt.chunk(columns, self._stop_at_shared) for prompt in prompts]
            area = len(chunks) * max(map(len, chunks))
            if area:
                reading.prompt(chunks)
            for prompt, chunk in zip(prompts, chunks, strict=True):
                prompt.done += len(chunk)
            for row, prompt in enumerate(prompts):
                if not prompt.unread or self._stop_at_shared and prompt.done == prompt.shared:
                    self._keep(company, row, prompt.tokens[: prompt.done])
            if area and (company.keeping or not company.unread) and time.monotonic() >= until:
                # Keeping a long prompt, and its first token, are steps' work of their own.
                return area, []
        if not self._copied(company, until):
            return area, []
        through = [row for row, prompt in enumerate(prompts) if not prompt.unread]
        if through:
            self._place(reading.take(through).decode([prompts[row].tokens[-1] for row in through]))
        company.prompts = [prompt for prompt in prompts if prompt.unread]
        return area, [prompt.progress() for prompt in prompts]

    def _columns(self, company: _Company, most: int, until: float) -> int:
        """How many columns to read now, for which there is room then; 0: this step's time went into making room."""
        reading = company.reading
        if until == math.inf:
            reading.make_room_at_once(company.unread)
            return most
        if reading.empty:
            # How large the caches will be is known after these.
            return min(most, mlx_lm_0_32.FIRST_COLUMNS)
        return most if reading.make_room(company.unread, until) else 0

    # --- Keeping ------------------------------------------------------------------------------------------------------

    def _keep(self, company: _Company, row: int, tokens: list[int]) -> None:
        if self._kept.wants(tokens):
            # Not copied before it is evaluated.
            cache = company.reading.extract_cache(row)
            company.keeping.append(_Keeping(tokens, cache, list(cache)))

    def _copied(self, company: _Company, until: float) -> bool:
        """Copy what is to be kept of it, layer after layer, at least one; whether that is done."""
        while company.keeping:
            keeping = company.keeping[0]
            if len(keeping.uncopied) == len(keeping.cache) and not self._kept.wants(keeping.tokens):
                # Another row's was the same.
                company.keeping.popleft()
                continue
            if keeping.uncopied:
                mlx_lm_0_32.evaluate([keeping.uncopied.pop()])
            if not keeping.uncopied:
                self._kept.put(keeping.tokens, keeping.cache)
                company.keeping.popleft()
            if time.monotonic() >= until:
                break
        return not company.keeping

    # --- Groups -------------------------------------------------------------------------------------------------------

    def _place(self, new: Decoding) -> None:
        """Into the group that it suits best, or into one of its own."""
        best = min(self._groups, key=lambda group: _padding(group, new), default=None)
        if best is not None and (len(self._groups) == MOST_GROUPS or self._suit(best, new)):
            best.extend(new)
        else:
            self._groups.append(new)

    def _suit(self, group: Decoding, new: Decoding) -> bool:
        """Whether joining costs less than decoding apart. It copies the caches of all rows."""
        copied = (len(group) + len(new)) * max(group.width, new.width)
        return _padding(group, new) <= self._most_padding and copied <= self._most_copied

    def _tidy(self) -> None:
        self._groups = [group for group in self._groups if len(group)]


def _padding(one: Decoding, other: Decoding) -> int:
    """How many more tokens the caches of both would hold as one rectangle than as two."""
    width = max(one.width, other.width)
    return len(one) * (width - one.width) + len(other) * (width - other.width)
