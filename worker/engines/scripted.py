"""The scripted engine: replies written in the prompt, at a pace that is set, with faults on demand, without a model.

Owns the script's meaning and each row's timetable. Must never know sockets or the broker: what it does to them it
does as an engine would (slow, failing, stuck, gone). Invariant: given clock and calls, it commits the same tokens
every time.

A prompt holds its script as a JSON object after the marker "@script". Every key is optional, unknown ones are refused:

  text       the reply, cut into words; or tokens: a list of strings, taken as they are
  count      so many tokens: tokens repeated, or else "word1 word2 ..."
  echo       true: the reply is the prompt's last user message without its script
  rate       tokens a second (0: one block each step); delay_s: seconds before the first token
  together   true: its first token waits for the next of the instants 1/rate apart that the engine counts from its
             loading, so that rows of one rate give their tokens in the same steps, as a real engine's do
  block      tokens that come at once, 1 to 256
  end        "stop" (default) or "length": how it ends after its last token
  fail_at    n: the row fails instead of giving its token n (counted from 0); likewise
  raise_at   step() raises;  crash_at  the process kills itself;  segv_at  by a segmentation fault
  hang_at    step() sleeps for ever;  spin_at  step() computes for ever
  refuse     true: start() raises Unsupported;  slow_cancel_s: cancel() takes so long
  memory     from its start on the process says that it holds so many bytes
  stamp      true: each token is " DUE:COMMITTED", the instants at which it was due and was made, in µs of this clock

Without a script the reply is 16 words, the first naming the prompt, so that replies cannot be mistaken for each other.
Reasoning is written <think>...</think>, a call <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and
Hermes models write them; where the tokenizer has the tokens of a thought channel, reasoning is written in one, as
DiffusionGemma does.
Sampling is accepted and has nothing to act upon. max_tokens ends a reply with "length", as in an engine whose end of
sequence would be one more token.
"""

import json
import math
import os
import re
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from common.generation import GenerationRequest, TokenLogprob, TopLogprob
from common.ids import RequestId
from worker.engine import Committed, Ended, EngineFacts, Markup, Prefilled, Step, Unsupported
from worker.engines.text import Texts
from worker.tool_calls import TAGGED_JSON

MARKER = "@script"
MARKUP = Markup(
    think_start="<think>",
    think_end="</think>",
    tool_start="<tool_call>",
    tool_end="</tool_call>",
    parse=lambda text, tools: json.loads(text),
    form=TAGGED_JSON,
)
CHANNEL_TOKENS = ("<|channel>", "<channel|>")
DEFAULT_TOKENS = 16
MAX_BLOCK = 256

# What a late call may deliver in one step, so that a stall of the caller does not become one huge burst.
MAX_LATE_TOKENS = 512

Fault = Literal["fail_at", "raise_at", "crash_at", "segv_at", "hang_at", "spin_at"]
FAULTS: tuple[Fault, ...] = ("fail_at", "raise_at", "crash_at", "segv_at", "hang_at", "spin_at")


class ScriptedError(RuntimeError):
    """The fault that raise_at asks for."""


class Script(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the prompt asks for; the keys are explained above. None: the engine's default."""

    text: str | None = None
    tokens: list[str] | None = None
    count: int | None = None
    echo: bool = False
    rate: float | None = None
    delay_s: float | None = None
    together: bool = False
    block: int | None = None
    end: Literal["stop", "length"] = "stop"
    fail_at: int | None = None
    raise_at: int | None = None
    crash_at: int | None = None
    segv_at: int | None = None
    hang_at: int | None = None
    spin_at: int | None = None
    refuse: bool = False
    slow_cancel_s: float = 0.0
    memory: int | None = None
    stamp: bool = False


@dataclass
class _Row:
    """One reply and its timetable."""

    id: RequestId
    script: Script
    tokens: list[str]
    reason: str
    prompt_length: int
    top_logprobs: int
    first_at: float
    rate: float
    block: int
    read: bool = False
    given: int = 0

    def due_at(self) -> float:
        """When the next block comes."""
        return self.first_at + (self.given / self.rate if self.rate else 0.0)

    def due(self, now: float) -> int:
        """How many tokens are due: whole blocks, and what is left at the end."""
        if now < self.due_at():
            return 0
        elapsed = (now - self.first_at) * self.rate
        late = (int(elapsed) // self.block + 1) * self.block - self.given if self.rate else self.block
        # At least a block: rounding may put `elapsed` just under the moment that due_at() named.
        return min(max(late, self.block), max(MAX_LATE_TOKENS, self.block), len(self.tokens) - self.given)

    def stamp(self, now: float) -> str:
        """The next token's text where it tells its times."""
        begun = self.given - self.given % self.block
        due_at = self.first_at + (begun / self.rate if self.rate else 0.0)
        return f" {due_at * 1e6:.0f}:{now * 1e6:.0f}"


class ScriptedEngine:
    """Engine without a model; see worker/engine.py for what each method promises."""

    facts: EngineFacts

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 16,
        context: int = 8192,
        rate: float = 50.0,
        delay_s: float = 0.0,
        block: int = 1,
        load_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        kill: Callable[[int, int], None] = os.kill,
    ) -> None:
        """folder: only its tokenizer.json is read. rate, delay_s, block: for scripts that do not say. load_s: load()
        takes it."""
        self._folder = folder
        self._rate, self._delay_s, self._block, self._load_s = rate, delay_s, block, load_s
        self._clock, self._sleep, self._kill = clock, sleep, kill
        self._rows: dict[RequestId, _Row] = {}
        self._memory = 0
        self._loaded_at = 0.0
        self.facts = EngineFacts(
            slots=slots,
            kv_tokens=slots * context,
            block=block,
            context=context,
            lanes=("batched",) if block == 1 else ("serial",),
            abilities=("sampling", "seed", "penalties", "logit_bias", "logprobs", "tools"),
            details={"backend": "scripted"},
            markup=MARKUP,
        )

    # --- Life ---------------------------------------------------------------------------------------------------------

    def load(self, progress: Callable[[str], None]) -> None:
        progress("reading the tokenizer")
        self._texts = Texts(self._folder)
        opens, closes = CHANNEL_TOKENS
        if {opens, closes} <= self._texts.tokenizer.get_vocab().keys():
            written = replace(MARKUP, think_start=f"{opens}thought\n", think_end=closes)
            self.facts = replace(self.facts, markup=written)
        if self._load_s:
            self._sleep(self._load_s)
        self._loaded_at = self._clock()

    def rebuild(self) -> None:
        self._rows.clear()

    def close(self) -> None:
        self._rows.clear()

    def memory(self) -> dict[str, int]:
        return {"active": self._memory, "cache": 0, "peak": self._memory}

    # --- Requests -----------------------------------------------------------------------------------------------------

    def lane_for(self, request: GenerationRequest) -> str:
        if request.grammar:
            raise Unsupported("grammar: this engine cannot honour it")
        if self._script(request)[0].refuse:
            raise Unsupported("refuse: the script says so")
        return self.facts.lanes[0]

    def start(self, request_id: RequestId, request: GenerationRequest) -> None:
        self.lane_for(request)
        script, prompt = self._script(request)
        self._memory = self._memory if script.memory is None else script.memory
        tokens = _tokens(script, prompt, request.prompt)
        capped = len(tokens) >= request.max_tokens
        rate = self._rate if script.rate is None else script.rate
        first_at = self._clock() + (self._delay_s if script.delay_s is None else script.delay_s)
        if script.together and rate:
            first_at = self._loaded_at + math.ceil((first_at - self._loaded_at) * rate) / rate
        self._rows[request_id] = _Row(
            id=request_id,
            script=script,
            tokens=tokens[: request.max_tokens],
            reason="length" if capped else script.end,
            prompt_length=len(request.prompt),
            top_logprobs=request.top_logprobs,
            first_at=first_at,
            rate=rate,
            block=script.block or self._block,
        )

    def cancel(self, request_id: RequestId) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None and row.script.slow_cancel_s:
            self._sleep(row.script.slow_cancel_s)

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    def due_in(self) -> float:
        if any(not row.read for row in self._rows.values()):
            return 0.0
        return max(0.0, min((row.due_at() for row in self._rows.values()), default=math.inf) - self._clock())

    def _script(self, request: GenerationRequest) -> tuple[Script, str]:
        """(the prompt's script, the last user message without it). Raises Unsupported for one that makes no sense."""
        message = self._last_message(request.prompt)
        before, marker, after = message.rpartition(MARKER)
        if not marker:
            return Script(), message
        try:
            plain, end = json.JSONDecoder().raw_decode(after.lstrip())
            script = msgspec.convert(plain, Script)
        except (ValueError, msgspec.ValidationError) as error:
            raise Unsupported(f"script: {error}") from None
        numbers = [script.count, script.rate, script.delay_s, script.slow_cancel_s, script.memory]
        if any(number is not None and number < 0 for number in numbers) or not 1 <= (script.block or 1) <= MAX_BLOCK:
            raise Unsupported(f"script: a number is negative, or block is not from 1 to {MAX_BLOCK}")
        return script, (before + after.lstrip()[end:]).strip()

    def _last_message(self, prompt: list[int]) -> str:
        """The text after the last "user" header between special tokens, or else the whole prompt."""
        stretches: list[list[int]] = [[]]
        for token in prompt:
            if self._texts.is_special(token):
                stretches.append([])
            else:
                stretches[-1].append(token)
        texts = [self._texts.tokenizer.decode(stretch, skip_special_tokens=False) for stretch in stretches]
        said = [text.removeprefix("user\n") for text in texts if text.startswith("user\n")]
        return said[-1] if said else "".join(texts)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[Step]:
        now = self._clock()
        steps: list[Step] = []
        for row in list(self._rows.values()):
            if not row.read:
                row.read = True
                steps.append(Prefilled(row.id, row.prompt_length, row.prompt_length))
            if now >= row.due_at():
                steps += self._advance(row, row.due(now))
        return steps

    def _advance(self, row: _Row, count: int) -> list[Step]:
        steps: list[Step] = []
        for _ in range(count):
            fault = next((name for name in FAULTS if getattr(row.script, name) == row.given), None)
            if fault == "fail_at":
                del self._rows[row.id]
                return [*steps, Ended(row.id, "failed", error="ScriptedFailure")]
            if fault:
                self._suffer(fault)
            steps.append(self._committed(row))
            row.given += 1
        if row.given >= len(row.tokens):
            del self._rows[row.id]
            steps.append(Ended(row.id, row.reason))
        return steps

    def _committed(self, row: _Row) -> Committed:
        # Read anew for each token: what the step still does afterwards is no part of an earlier moment.
        text = row.stamp(self._clock()) if row.script.stamp else row.tokens[row.given]
        token = self._texts.tokenizer.token_to_id(text)
        logprob = _logprob(text, row.given, row.top_logprobs)
        return Committed(row.id, row.given if token is None else token, text, logprob)

    def _suffer(self, fault: Fault) -> None:
        """A fault of the whole process; returns only where `kill` does not kill."""
        if fault == "raise_at":
            raise ScriptedError("the script says so")
        if fault == "crash_at":
            self._kill(os.getpid(), signal.SIGKILL)
        if fault == "segv_at":
            self._kill(os.getpid(), signal.SIGSEGV)
        while fault == "hang_at":
            self._sleep(60.0)
        while fault == "spin_at":
            pass


def _tokens(script: Script, message: str, prompt: list[int]) -> list[str]:
    if script.tokens is not None:
        tokens = script.tokens
    elif script.text is not None or script.echo:
        tokens = re.findall(r"\s*\S+|\s+\Z", message if script.text is None else script.text)
    else:
        name = zlib.crc32(repr(prompt).encode())
        # A script that only says how many gets tokens that can be counted; a plain prompt gets one that names it.
        count = DEFAULT_TOKENS if script.count is None else script.count
        first = f"word{name:08x}" if script == Script() else "word1"
        return [first, *(f" word{number}" for number in range(2, count + 1))][:count]
    if script.count is not None and tokens:
        return [tokens[index % len(tokens)] for index in range(script.count)]
    return tokens


def _logprob(text: str, index: int, top: int) -> TokenLogprob | None:
    if top < 0:
        return None
    value = -0.125 * (index % 8)
    spelled = [text, *(f"{text}~{number}" for number in range(1, top))][:top]
    best = [TopLogprob(rival, value - number, list(rival.encode())) for number, rival in enumerate(spelled)]
    return TokenLogprob(text, value, list(text.encode()), best)
