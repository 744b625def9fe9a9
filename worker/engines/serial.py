"""The serial engine: any TextGenerator, one request at a time, one block a step.

Owns the requests that wait, the one that runs, what ends it and its seed. Must never know what a generator computes, nor
sockets or processes. Invariant: a reply that was cancelled before, between or after its blocks computes no further one; the
step after the last block, which computes nothing, gives the Ended, so that a cancel which came during that block is still
seen before it.

A generator is iterated, not called back: what drives it is the loop that also takes cancels and new work, on the one
thread that MLX's streams belong to.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.generation import GenerationRequest
from common.ids import RequestId
from worker import device, model_files
from worker.engine import Committed, Ended, EngineFacts, Markup, Prefilled, Step, Unsupported
from worker.engines import markup
from worker.engines.text import Texts
from worker.generators import Block, TextGenerator
from worker.placement import SERIAL

Progress = Callable[[str], None]
Make = Callable[[Texts, Progress], TextGenerator]

WARM_UP_TOKENS = 2


class NoEnd(RuntimeError):
    """A generator's blocks ran out without an end: a fault of the generator."""


@dataclass(eq=False)
class _Reply:
    """The request that runs. blocks: not begun before its first step."""

    id: RequestId
    prompt_tokens: int
    blocks: Iterator[Block]
    read: bool = False
    ended: Ended | None = None


class SerialEngine:
    """Engine on a TextGenerator; see worker/engine.py for what each method promises."""

    facts: EngineFacts

    def __init__(self, folder: Path, make: Make, *, slots: int = 1, context: int = 0) -> None:
        """make: loads the generator, on the thread that calls load(). slots: requests that may wait here, the running
        one included; more than one gains nothing but the way from the broker. context 0: the model's own."""
        self._folder = folder
        self._make = make
        self._slots = slots
        self._context = context
        self._waiting: dict[RequestId, GenerationRequest] = {}
        self._reply: _Reply | None = None
        self._generator: TextGenerator | None = None

    # --- Life ---------------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> None:
        begun = time.monotonic()
        found = model_files.read(self._folder)
        self._texts = Texts(self._folder)
        self._stop_ids = found.eos_ids
        self._generator = generator = self._make(self._texts, progress)
        context = min(self._context or found.context, found.context, generator.max_prompt_tokens + 1)
        written = self._markup(generator)
        self.facts = EngineFacts(
            slots=self._slots,
            kv_tokens=self._slots * context,
            block=generator.block,
            context=context,
            lanes=(SERIAL,),
            abilities=(*generator.abilities, "tools") if written.parse else tuple(generator.abilities),
            details={"backend": device.backend(), "blas": device.blas_in_use(), "model": found.kind} | generator.details,
            markup=written,
        )
        progress("warming up")
        for _ in generator.generate([0] * 3, WARM_UP_TOKENS, self._stop_ids, (), None):
            pass
        progress(f"ready after {time.monotonic() - begun:.1f} s on {self.facts.details['blas']}")

    def rebuild(self) -> None:
        self._waiting.clear()
        self._drop()
        device.clear_cache()

    def close(self) -> None:
        self.rebuild()
        self._generator = None

    def memory(self) -> dict[str, int]:
        return device.memory()

    def _markup(self, generator: TextGenerator) -> Markup:
        """The folder's, with the generator's thought channel: a marker is the sequence of its tokens, never one alone."""
        written = markup.read(self._folder, self._texts.tokenizer)
        start, end = (
            self._texts.tokenizer.decode(list(ids), skip_special_tokens=False)
            for ids in generator.thought_channel_marker_ids
        )
        return replace(written, think_start=start, think_end=end) if start and end else written

    # --- Requests -----------------------------------------------------------------------------------------------------

    def lane_for(self, request: GenerationRequest) -> str:
        assert self._generator is not None
        prompt, vocabulary = request.prompt, self._generator.vocabulary
        if not prompt:
            raise Unsupported("prompt: it has no token")
        # mlx checks no index: one past the end reads beyond the array.
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise Unsupported(f"prompt: a token is not one of the model's {vocabulary}")
        if len(prompt) > self._generator.max_prompt_tokens:
            raise Unsupported(f"prompt: {len(prompt)} tokens, {self._generator.max_prompt_tokens} are possible")
        return SERIAL

    def start(self, request_id: RequestId, request: GenerationRequest) -> None:
        self.lane_for(request)
        self._waiting[request_id] = request

    def cancel(self, request_id: RequestId) -> None:
        if self._waiting.pop(request_id, None) is None and self._reply and self._reply.id == request_id:
            self._drop()

    @property
    def busy(self) -> bool:
        return bool(self._reply or self._waiting)

    def due_in(self) -> float:
        return 0.0

    # --- Steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[Step]:
        if self._reply is None:
            if not self._waiting:
                return []
            self._reply = self._begun()
        reply = self._reply
        if reply.ended is not None:
            self._drop()
            return [reply.ended]
        steps: list[Step] = []
        block = next(reply.blocks, None)
        if block is None:
            raise NoEnd(f"{type(self._generator).__name__} ended a reply without saying how")
        if not reply.read:
            reply.read = True
            steps.append(Prefilled(reply.id, reply.prompt_tokens, reply.prompt_tokens))
        steps += [Committed(reply.id, token, text) for token, text in block.tokens]
        if block.end is not None:
            ended = Ended(reply.id, block.end.reason, block.end.text)
            if block.tokens:
                # A step of its own; one without tokens is that already.
                reply.ended = ended
            else:
                self._drop()
                steps.append(ended)
        return steps

    def _begun(self) -> _Reply:
        assert self._generator is not None
        id = next(iter(self._waiting))
        request = self._waiting.pop(id)
        blocks = self._generator.generate(
            request.prompt,
            request.max_tokens,
            (*self._stop_ids, *self._one_token_stops(request)),
            self._texts.special,
            _seed(request),
        )
        return _Reply(id, len(request.prompt), blocks)

    def _drop(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            # Not left to the garbage collector: it holds the reply's KV.
            close = getattr(reply.blocks, "close", None)
            if close is not None:
                close()

    def _one_token_stops(self, request: GenerationRequest) -> list[int]:
        """Stop strings that one token spells: its id ends the block there, before its text exists.

        Others are matched in the text. So are these, for tokens that only contain them; and where the model may think,
        because a stop string counts for what follows the thoughts.
        """
        if request.thinking and not request.raw and not request.stop_in_reasoning:
            return []
        found = []
        for stop in request.stop:
            ids = self._texts.tokenizer.encode(stop, add_special_tokens=False).ids
            if len(ids) == 1 and self._texts.raw(ids[0]) == stop.encode():
                found.append(ids[0])
        return found


def _seed(request: GenerationRequest) -> int | None:
    """The request's seed and choice as one number."""
    if request.sampling.seed is None:
        return None
    digest = hashlib.blake2b(f"{request.sampling.seed}:{request.choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
