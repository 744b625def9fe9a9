"""What a request needs, and which lane of an engine serves it (pure).

plan() looks at a request once and answers with a Plan or refuses with the first need that no lane can serve; it never
leaves a need out to make a request fit. Must never know an engine's workings, text machines or instants. Invariant: a
plan begins once and is released once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.generation import GenerationRequest, Sampling
from worker.engine import EngineFacts, Unsupported
from worker.tool_calls import read_offer

SPECULATIVE, SERIAL = "serial+spec", "serial"

# Reason codes of a placement, one for each lane that was looked at: taken, or why not.
TAKEN, BUSY, LACKS = "taken", "busy", "lacks"


@dataclass(frozen=True)
class Shape:
    """What a request needs, as names of abilities. Neutral values (penalty 1.0, bias {}) are no need."""

    needs: tuple[str, ...]
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Lane:
    """One way of generating. alone: it serves only a request that finds the worker idle."""

    name: str
    abilities: frozenset[str]
    alone: bool = False


class PlanUsed(Exception):
    """A plan was begun a second time: a fault of ours."""


def shape_of(request: GenerationRequest) -> Shape:
    """The request's shape. Raises ProtocolError for tools that are none."""
    sampling, neutral = request.sampling, Sampling()
    offer = read_offer(request.tools)

    def changed(*names: str) -> bool:
        return any(getattr(sampling, name) != getattr(neutral, name) for name in names)

    asked = {
        "sampling": changed("temperature", "top_p", "top_k", "min_p"),
        # Greedy draws nothing, so it is reproducible without one.
        "seed": sampling.seed is not None and sampling.temperature > 0,
        "penalties": changed("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "logit_bias": any(sampling.logit_bias.values()),
        "logprobs": request.top_logprobs >= 0,
        "grammar": bool(request.grammar),
        "tools": bool(offer.definitions),
        # A call can only be promised by what shapes the tokens: a grammar for the format that the model calls in.
        "tool_choice": offer.forced,
    }
    return Shape(tuple(name for name, needed in asked.items() if needed), len(request.prompt), request.max_tokens)


def lanes_of(facts: EngineFacts) -> list[Lane]:
    """An engine's lanes, in its order of preference."""
    parses = facts.markup is not None and facts.markup.parse is not None
    lanes = []
    for name in facts.lanes:
        abilities = set(facts.lane_abilities.get(name, facts.abilities))
        # An engine only makes text; whether calls can be read out of it is a matter of the markup.
        abilities.discard("tools")
        lanes.append(Lane(name, frozenset(abilities | {"tools"} if parses else abilities), alone=name == SPECULATIVE))
    return lanes


def place(shape: Shape, lanes: Sequence[Lane], busy: bool) -> tuple[str, tuple[str, ...]]:
    """(lane, reason codes "lane: reason" of the lanes looked at). Raises Unsupported with the first need that is left.

    A lane that is busy is passed over for one that is not, and waited for when there is none.
    """
    reasons: list[str] = []
    least: list[str] = []
    waits = ""
    for lane in lanes:
        lacking = [need for need in shape.needs if need not in lane.abilities]
        if lacking:
            least = min(least or lacking, lacking, key=len)
            reasons.append(f"{lane.name}: {LACKS} {', '.join(lacking)}")
        elif lane.alone and busy:
            waits = waits or lane.name
            reasons.append(f"{lane.name}: {BUSY}")
        else:
            return lane.name, (*reasons, f"{lane.name}: {TAKEN}")
    if waits:
        return waits, tuple(reasons)
    raise Unsupported(f"{least[0] if least else 'lane'}: {'; '.join(reasons)}")


class Plan:
    """One request's way through a worker."""

    def __init__(self, request: GenerationRequest, shape: Shape, lane: str, reasons: tuple[str, ...]) -> None:
        self.request = request
        self.shape = shape
        self.lane = lane
        self.reasons = reasons
        self._begun = False
        self._held = False

    def begin(self) -> GenerationRequest:
        """The request, for the engine. Raises PlanUsed the second time, which takes and releases nothing."""
        if self._begun:
            raise PlanUsed(f"the plan for lane {self.lane} was begun before")
        self._begun = self._held = True
        return self.request

    def release(self) -> bool:
        """Whether there is something to release: once, on whichever way out comes first."""
        held, self._held = self._held, False
        return held


def plan(request: GenerationRequest, facts: EngineFacts, busy: bool) -> Plan:
    """The plan of a request. Raises Unsupported and ProtocolError."""
    shape = shape_of(request)
    lane, reasons = place(shape, lanes_of(facts), busy)
    room = facts.context - shape.prompt_tokens
    if room < 1:
        raise Unsupported(f"prompt: {shape.prompt_tokens} tokens leave no room in a context of {facts.context}")
    if room < request.max_tokens:
        request = msgspec.structs.replace(request, max_tokens=room)
    return Plan(request, shape, lane, reasons)


def lane_that_ran(planned: str, accepted: int, rejected: int) -> str:
    """The lane by the statistics at the end: one that speculates and drafted nothing ran plain."""
    return SERIAL if planned == SPECULATIVE and not accepted and not rejected else planned
