"""The parts of mlx-lm 0.32.2 that have no promise of stability, behind names of our own.

Only this module touches them; tests/worker/test_mlx_lm_private.py fails when the pinned version or one of them
changes. Must never know requests or text, nor when a prompt is read (worker/engines/batch.py). Invariant: what mlx-lm
does by itself and we do not want (a wired limit, token lists changed in place, a softmax nobody asked for) stays
inside.

mlx-lm's BatchGenerator is not used: it reads all prompts as one rectangle in chunks of one size, decodes all rows as
another, and normalizes every row's logits. Its two halves, the batch that reads and the batch that decodes, are.
"""

import importlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm import tokenizer_utils
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.utils import _tokenizer_defaults, dequantize_model, load_model

from worker.engines.cpu_kernels import logsumexp, one_pass
from worker.engines.grammar import RowGrammar, masked

VERSION = "0.32.2"

# `import mlx_lm.generate` yields the function of that name, which the package binds over its module.
generate = importlib.import_module("mlx_lm.generate")

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]
# What one row has read, layer by layer.
Cache = list[Any]
# What a growing cache has room for at once.
FIRST_COLUMNS = BatchKVCache.step


@dataclass(frozen=True, eq=False)
class RowNeeds:
    """What is done to one row's logits. shows: its log-probabilities are wanted."""

    uid: int
    max_tokens: int
    sampler: Sampler
    processors: Sequence[Processor] = ()
    grammar: RowGrammar | None = None
    shows: bool = False


@dataclass(frozen=True)
class Token:
    """A row's next token. reason: "", stop or length. sound: it was drawn from finite numbers. logprobs: (V,), those of
    the model itself, for rows that show them."""

    uid: int
    token: int
    reason: str
    sound: bool
    logprobs: mx.array | None


@dataclass(frozen=True, eq=False)
class _Drawn:
    """What is known of a drawn token beside its id; not yet computed. sound: (B,) of the step that drew it."""

    sound: mx.array
    row: int
    logprobs: mx.array | None


@dataclass(frozen=True)
class MarkupRules:
    """What mlx-lm makes of a tokenizer and its template. thinking: start and end marker, "" for none. tool_parser: a
    module's name. defaults: entries for tokenizer_config.json that known models lack."""

    thinking: tuple[str, str]
    tool_parser: str | None
    structure: tuple[str, ...]
    defaults: dict[str, Any]


def markup_rules(folder: Path, tokenizer: Any) -> MarkupRules:
    """By mlx-lm's own rules. tokenizer: whatever has get_vocab(), encode() and chat_template."""
    start, end = tokenizer_utils._infer_thinking(tokenizer)[:2]
    return MarkupRules(
        (start or "", end or ""),
        tokenizer_utils._infer_tool_parser(tokenizer),
        tuple(tokenizer_utils._infer_structural_markers(tokenizer)),
        _tokenizer_defaults(folder) or {},
    )


def load(folder: Path) -> nn.Module:
    """The model in `folder`, its weights still in the files. Raises whatever mlx-lm raises for what it cannot load."""
    model, _ = load_model(folder, lazy=True)
    _share_frequencies(model)
    return model


def _share_frequencies(model: nn.Module) -> None:
    """One array for all layers that rotate alike, in place of one each of the same numbers, for the same reason as
    _share_offsets()."""
    kept: dict[tuple[Any, ...], mx.array] = {}
    for _, module in model.named_modules():
        frequencies = getattr(module, "_freqs", None)
        if isinstance(frequencies, mx.array) and frequencies.dtype == mx.float32:
            module._freqs = kept.setdefault(tuple(frequencies.tolist()), frequencies)


def unpack_quantized(model: nn.Module) -> nn.Module:
    """The model with plain layers in place of quantized ones, not yet evaluated."""
    model = dequantize_model(model)
    # Those of latent attention it leaves packed.
    plain = [(name, _plain(layer)) for name, layer in model.named_modules() if isinstance(layer, QuantizedMultiLinear)]
    if plain:
        model.update_modules(tree_unflatten(plain))
    return model


def _plain(layer: QuantizedMultiLinear) -> MultiLinear:
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits, layer.mode)
    made = MultiLinear(weight.shape[2], weight.shape[1], weight.shape[0])
    made.weight = weight
    return made


def new_cache(model: nn.Module) -> Cache:
    """A cache that has read nothing."""
    return list(make_prompt_cache(model))


def can_be_cut(model: nn.Module) -> bool:
    """Whether what a row has read can always be cut back to its first tokens (not so for sliding windows, states)."""
    return all(type(layer) is KVCache for layer in make_prompt_cache(model))


def evaluate(cache: Cache) -> None:
    """Compute what a cache holds; on the thread that steps."""
    mx.eval([layer.state for layer in cache])


@dataclass(frozen=True)
class Round:
    """What one pass of the model over drafted tokens gave. tokens: (id, whether it had been drafted); the last one is the
    model's own, unless the reply's last was a drafted one. rejected: drafts that it did not agree with. sound: drawn from
    finite numbers."""

    tokens: list[tuple[int, bool]]
    rejected: int
    sound: bool


def speculate(
    model: nn.Module, draft: Callable[..., mx.array], last: int, caches: Cache, draft_tokens: int, max_tokens: int,
    sampler: Sampler,
) -> Iterator[Round]:  # fmt: skip
    """Rounds until max_tokens are given, at least one token each. last: the prompt's last token; caches: the model's
    layers', then the draft's, which have read all before it. Closing the iterator leaves the caches consistent."""
    steps = generate.speculative_generate_step(
        mx.array([last]), model, draft, mx.default_stream(mx.default_device()), num_draft_tokens=draft_tokens,
        max_tokens=max_tokens, sampler=sampler, prompt_cache=caches,
    )  # fmt: skip
    given = 0
    try:
        while given < max_tokens:
            drafted = min(max_tokens - given, draft_tokens)
            tokens: list[tuple[int, bool]] = []
            sound = True
            for token, logprobs, from_draft in steps:
                tokens.append((token, from_draft))
                given += 1
                if not from_draft or given == max_tokens:
                    # A NaN anywhere in a row is one everywhere in its log-probabilities.
                    sound = math.isfinite(logprobs[token].item())
                    break
            accepted = sum(from_draft for _, from_draft in tokens)
            yield Round(tokens, drafted - accepted, sound)
    finally:
        steps.close()


class Decoding(generate.GenerationBatch):
    """Rows that decode together. A step draws each row's next token while the caller works on the one before."""

    def __init__(self, needs: Sequence[RowNeeds], stops: Any, model: nn.Module, inputs: mx.array, caches: Cache,
                 tokens: list[list[int]]) -> None:  # fmt: skip
        self._needs = {need.uid: need for need in needs}
        super().__init__(
            model, [need.uid for need in needs], inputs, caches, tokens, [need.sampler for need in needs],
            generate.greedy_sampler, [list(need.processors) for need in needs], [stops] * len(needs),
            [need.max_tokens for need in needs],
        )  # fmt: skip

    def extend(self, batch: "Decoding") -> None:
        super().extend(batch)
        self._needs |= batch._needs

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self._needs = {uid: self._needs[uid] for uid in self.uids}

    def extract_cache(self, idx: int) -> Cache:
        """Nothing: the parent copies the cache of every row that ends, and nobody asks for it."""
        return []

    def remove(self, uid: int) -> None:
        """Take a row out; the others' tokens do not change."""
        self.filter([row for row, other in enumerate(self.uids) if other != uid])

    def wait(self) -> None:
        """Until the tokens that are being drawn are there."""
        mx.eval(self._next_tokens)

    @property
    def width(self) -> int:
        """Columns of the rectangle that its caches are; 0 for a model without any."""
        return max((layer.size() for layer in self.prompt_cache), default=0)

    def step(self) -> list[Token]:
        """The token of each row that was drawn in the last step; rows that end with it are gone."""
        responses = self.next()
        sound = {id(item.logprobs.sound): item.logprobs.sound.tolist() for item in responses}
        return [
            Token(
                item.uid,
                item.token,
                item.finish_reason or "",
                sound[id(item.logprobs.sound)][item.logprobs.row],
                item.logprobs.logprobs,
            )
            for item in responses
        ]

    def _step(self) -> tuple[list[int], list[_Drawn]]:
        # Empty in the constructor's step, whose inputs are the last tokens of the prompts.
        drawn = self._next_logprobs
        self._current_tokens, self._current_logprobs = self._next_tokens, drawn
        inputs = self._current_tokens
        needs = [self._needs[uid] for uid in self.uids]
        raw = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        logits, contexts = self._processed(raw, inputs, needs)
        if any(need.grammar for need in needs):
            logits = _constrained(logits, inputs if drawn else None, needs)
        sampled = _sampled(logits, needs)
        best = mx.take_along_axis(logits, sampled[:, None].astype(mx.int32), axis=-1)[:, 0]
        # A NaN anywhere in a row is its maximum too.
        sound = mx.isfinite(best) & mx.isfinite(logits.max(axis=-1))
        shown = _logprobs(raw, needs)
        self._next_tokens = sampled
        self._next_logprobs = [_Drawn(sound, row, shown.get(need.uid)) for row, need in enumerate(needs)]
        mx.async_eval(sampled, sound, list(shown.values()), contexts)
        tokens = inputs.tolist()
        for known, token in zip(self.tokens, tokens, strict=True):
            known.append(token)
        return tokens, drawn

    def _processed(
        self, logits: mx.array, inputs: mx.array, needs: Sequence[RowNeeds]
    ) -> tuple[mx.array, list[mx.array]]:
        """Each row's own changes to its logits, and the token buffers that these grew."""
        if not any(need.processors for need in needs):
            return logits, []
        rows, contexts = [], []
        for row, need in enumerate(needs):
            own = logits[row : row + 1]
            if need.processors:
                context = self._token_context[row].update_and_fetch(inputs[row : row + 1])
                contexts.append(context)
                for process in need.processors:
                    own = process(context, own)
            rows.append(own)
        return mx.concatenate(rows, axis=0), contexts


class Reading(generate.PromptProcessingBatch):
    """Rows whose prompts are read together, each with the tokens that its cache holds already."""

    def __init__(
        self, needs: Sequence[RowNeeds], stops: Any, model: nn.Module, caches: Sequence[Cache | None],
        known: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        self.needs = list(needs)
        self._stops = stops
        super().__init__(
            _in_passes(model),
            [need.uid for need in needs],
            [make_prompt_cache(model) if cache is None else cache for cache in caches],
            # Copies: the lists grow as the rows do.
            [list(tokens) for tokens in known],
            # The chunks come in the size they are to be read in.
            prefill_step_size=1 << 30,
            samplers=[None] * len(needs),
            logits_processors=[()] * len(needs),
        )

    @property
    def empty(self) -> bool:
        """Whether no row has read anything."""
        return not any(self.tokens)

    def lacks_room(self, unread: int) -> bool:
        """Whether a layer that holds something has no room for that many more tokens a row and the one that decoding
        begins with."""
        return bool(self._short(unread))

    def make_room(self, unread: int, until: float) -> bool:
        """Room for them in layer after layer, at least one, while time.monotonic() is before `until`; whether all have it
        and time is left. A cache that grows by its usual 256 is copied whole each time."""
        for layer in self._short(unread):
            columns = _whole_steps(layer._idx + unread + 1) - layer._idx
            layer.keys, layer.values = (
                mx.pad(part[..., : layer._idx, :], [(0, 0), (0, 0), (0, columns), (0, 0)])
                for part in (layer.keys, layer.values)
            )
            mx.eval(layer.keys, layer.values)
            if time.monotonic() >= until:
                return False
        return True

    def _short(self, unread: int) -> list[BatchKVCache]:
        return [
            layer for layer in self.prompt_cache
            if type(layer) is BatchKVCache and layer.keys is not None and layer.keys.shape[2] - layer._idx <= unread
        ]  # fmt: skip

    def make_room_at_once(self, unread: int) -> None:
        """The same in all layers, as part of the next prompt()."""
        _grow_by(self.prompt_cache, _whole_steps(unread + 1))

    def _copy(self) -> "Reading":
        copied = super()._copy()
        copied.needs, copied._stops = list(self.needs), self._stops
        return copied

    def filter(self, keep: list[int]) -> None:
        super().filter(keep)
        self.needs = [self.needs[row] for row in keep]

    def take(self, rows: list[int]) -> "Reading":
        """These rows as a batch of their own."""
        # Without the copy that split() makes of both halves.
        return self if len(rows) == len(self.needs) else self.split(rows)

    def decode(self, last: list[int]) -> Decoding:
        """The rows with their prompts' last tokens, ready to decode; this batch is used up."""
        _grow_by(self.prompt_cache, FIRST_COLUMNS)
        return Decoding(self.needs, self._stops, self.model, mx.array(last), self.prompt_cache, self.tokens)


def _in_passes(model: nn.Module) -> Callable[..., mx.array]:
    """The model as mlx-lm's batches call it, each call of it a pass in which all layers share what they can."""

    def called(tokens: mx.array, cache: Cache) -> mx.array:
        _share_offsets(cache)
        with one_pass():
            return model(tokens, cache=cache)

    return called


def _share_offsets(cache: Cache) -> None:
    """One array for all layers that hold as much, in place of one each of the same numbers: what is computed from it is
    computed once then."""
    offsets: dict[int, mx.array] = {}
    for layer in cache:
        if type(layer) is BatchKVCache:
            layer.offset = offsets.setdefault(layer._idx, layer.offset)


def _whole_steps(columns: int) -> int:
    return -(-columns // FIRST_COLUMNS) * FIRST_COLUMNS


def _grow_by(cache: Cache, columns: int) -> None:
    for layer in cache:
        if type(layer) is BatchKVCache:
            layer.step = columns


def stops(stop_ids: Sequence[int]) -> Any:
    """The tokens that end a row."""
    return generate.StopSequences([[token] for token in stop_ids])


def _constrained(logits: mx.array, inputs: mx.array | None, needs: Sequence[RowNeeds]) -> mx.array:
    """The logits behind the grammars' masks, which depend on the inputs' values."""
    # Computed while the matchers work.
    mx.async_eval(logits)
    if inputs is not None:
        for need, token in zip(needs, inputs.tolist(), strict=True):
            if need.grammar is not None:
                need.grammar.take(token)
    return masked(logits, [need.grammar for need in needs])


def _sampled(logits: mx.array, needs: Sequence[RowNeeds]) -> mx.array:
    """One token a row; rows that share a sampler are drawn in one call."""
    rows_of: dict[int, list[int]] = {}
    for row, need in enumerate(needs):
        rows_of.setdefault(id(need.sampler), []).append(row)
    if len(rows_of) == 1:
        return needs[0].sampler(logits)
    groups = list(rows_of.values())
    drawn = [needs[rows[0]].sampler(logits[mx.array(rows)]) for rows in groups]
    order = [row for rows in groups for row in rows]
    return mx.concatenate(drawn)[mx.array([order.index(row) for row in range(len(needs))])]


def _logprobs(raw: mx.array, needs: Sequence[RowNeeds]) -> dict[int, mx.array]:
    """By uid, for the rows that show them, from before everything that was done to the logits."""
    rows = [row for row, need in enumerate(needs) if need.shows]
    if not rows:
        return {}
    asked = (raw if len(rows) == len(needs) else raw[mx.array(rows)]).astype(mx.float32)
    normal = asked - logsumexp(asked)
    return {needs[row].uid: normal[place] for place, row in enumerate(rows)}
