"""Orders from commands: which change they ask for, whether it can be, and how far it is.

Turns an ORDER into a worker/rollout by way of a new plan, one at a time, and answers each question once with the truth: why
it cannot be, or what has happened when it is over. Plans in a thread, because asking the device takes seconds in which the
pool has to live. Never touches a process. Invariant: what is kept for the next start is only what has come through.
"""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from common import changes, logs
from common.envelope import NO_QUESTION, Order
from common.errors import ConfigError
from common.models import ModelChoice, check_folder
from common.runtime import Runtime
from worker.layout import Layout, lay_out, reseat
from worker.rollout import Change, Restart, Rollout, Step
from worker.settings import WorkerSettings
from worker.supervision import Effect, Supervision, Told

# Answers kept for commands whose question comes again because their session was lost meanwhile.
ANSWERS = 16


class Refusal(Exception):
    """The text is the answer."""


@dataclass(frozen=True)
class _Wish:
    """What a change should lead to. leaving: children that may not stay."""

    chosen: WorkerSettings
    wanted: dict[str, int]
    leaving: frozenset[str]
    begins: str
    words: str
    keeps_new: bool = False


class Changes:
    """The pool's changes, one after the other."""

    def __init__(
        self, chosen: WorkerSettings, core: Supervision, layout: Layout, place: Runtime, ring: Callable[[], None]
    ) -> None:
        """ring: called from another thread when advance() has something to do."""
        self._chosen = chosen
        self._core = core
        self._environments = dict(layout.environments)
        self._place = place
        self._ring = ring
        self._threads = ThreadPoolExecutor(1, "plan")
        self._numbers = 0
        self._planning: tuple[bytes, _Wish, Future[Layout]] | None = None
        self._change: Change | None = None
        self._question = b""
        self._follows: tuple[_Wish, Layout] | None = None
        self._answered: OrderedDict[bytes, Told] = OrderedDict()

    def environment(self, key: str) -> dict[str, str]:
        """What the seat with this key is started with."""
        return self._environments[key]

    def obey(self, order: Order, now: float) -> list[Effect]:
        """Begin what is asked for, or say why not.

        The broker's own wish (no question) names the process it means by its pid, and is said again while it stays
        unfulfilled, so it needs no answer.
        """
        if order.question == NO_QUESTION:
            child = self._core.children.get(order.target)
            if self._is_busy() or child is None or child.pid != order.count:
                return []
        elif order.question in self._answered:
            return [self._answered[order.question]]
        if order.question == self._question and self._is_busy():
            return []
        try:
            if self._is_busy():
                raise Refusal(f"another change is under way: {self._change.words if self._change else 'a plan is made'}")
            if not self._core.ever_ready:
                raise Refusal("the pool is still starting")
            self._question = order.question
            if order.action == "restart":
                return self._restart(order.target, now)
            wish = self._wish(order)
            if wish is None:
                return self._answers([Told(order.question, True, "it is so already", True)])
        except Refusal as refusal:
            return self._answers([Told(order.question, False, str(refusal), True)])
        self._numbers += 1
        future = self._threads.submit(lay_out, wish.chosen, self._numbers)
        self._planning = order.question, wish, future
        future.add_done_callback(lambda _: self._ring())
        return []

    def advance(self, now: float) -> list[Effect]:
        """Call after every event."""
        effects: list[Effect] = []
        if self._planning is not None and self._planning[2].done():
            effects += self._planned(*self._planning)
            self._planning = None
        if self._change is not None:
            effects += self._answers(self._change.advance(now))
            if self._change.over:
                self._come_through()
        return effects

    def abandon(self, reason: str) -> list[Effect]:
        """The pool ends; whoever waits is told."""
        effects: list[Effect] = []
        if self._planning is not None:
            effects.append(Told(self._planning[0], False, reason, True))
            self._planning = None
        if self._change is not None:
            effects += self._change.abandon(reason)
            self._change = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        return effects

    # -- inside

    def _is_busy(self) -> bool:
        return self._change is not None or self._planning is not None

    def _restart(self, target: str, now: float) -> list[Effect]:
        self._children_of(target)
        effects = self._core.restart(target, now)
        self._change = Restart(self._core, self._question, target)
        return [*effects, Told(self._question, True, f"{_workers(len(self._change.names))} to restart", False)]

    def _wish(self, order: Order) -> _Wish | None:
        """What an order means. None: it is so already. Raises Refusal."""
        counts = {name: model.workers for name, model in self._core.models.items()}
        match order.action:
            case "scale":
                return self._scaled(counts, order.target, order.count)
            case "drain":
                return self._drained(counts, order.target)
            case "swap":
                return self._swapped(counts, order.target, order.source)
            case "roll":
                names = self._children_of(order.target)
                words = f"restarted {', '.join(sorted(names))}, one after the other"
                chosen = self._with(counts, self._chosen.model)
                return _Wish(chosen, counts, names, f"{_workers(len(names))} to restart", words, keeps_new=True)
        raise Refusal(f"the pool does not know how to {order.action}")

    def _scaled(self, counts: dict[str, int], model: str, count: int) -> _Wish | None:
        self._known(model)
        if count < 1:
            raise Refusal(f"{model} needs at least one worker")
        before = counts[model]
        if count == before:
            return None
        chosen = self._with(counts | {model: count}, self._chosen.model)
        begins, words = f"{model}: from {_workers(before)} to {count}", f"{model} has {_workers(count)}"
        return _Wish(chosen, counts | {model: count}, frozenset(), begins, words)

    def _drained(self, counts: dict[str, int], name: str) -> _Wish:
        child = self._core.children.get(name)
        if child is None or child.retiring:
            raise Refusal(f"there is no worker {name!r}; there are {', '.join(self._core.children)}")
        if counts[child.model] == 1:
            raise Refusal(f"{name} is the only worker of {child.model}; millpond restart --rolling {child.model} replaces it")
        wanted = counts | {child.model: counts[child.model] - 1}
        words = f"{name} has left; {child.model} has {_workers(wanted[child.model])}"
        return _Wish(self._with(wanted, self._chosen.model), wanted, frozenset({name}), f"{name} takes nothing new", words)

    def _swapped(self, counts: dict[str, int], model: str, source: str) -> _Wish:
        self._known(model)
        choice = ModelChoice(model, source)
        try:
            check_folder(choice)
        except ConfigError as error:
            raise Refusal(str(error)) from None
        models = [choice if one.name == model else one for one in self._chosen.model]
        words = f"{model} is served from {source}"
        return _Wish(self._with(counts, models), counts, self._children_of(model), f"{model}: to {source}", words)

    def _with(self, counts: dict[str, int], models: list[ModelChoice]) -> WorkerSettings:
        return dataclasses.replace(self._chosen, workers=list(counts.items()), model=models)

    def _known(self, model: str) -> None:
        if model not in self._core.models:
            raise Refusal(f"there is no model {model!r}; there are {', '.join(self._core.models)}")

    def _children_of(self, target: str) -> frozenset[str]:
        """Names of the children that a target means. Raises Refusal when there are none."""
        names = {c.name for c in self._core.children.values() if target in ("", c.name, c.model) and not c.retiring}
        if not names:
            there = ", ".join([*self._core.models, *self._core.children])
            raise Refusal(f"there is no model or worker {target!r}; there are {there}")
        return frozenset(names)

    def _planned(self, question: bytes, wish: _Wish, future: Future[Layout]) -> list[Effect]:
        try:
            layout = future.result()
        except ConfigError as error:
            spare = wish.chosen.spare_workers
            counted = f" (with {spare} kept free by MILLPOND_SPARE_WORKERS)" if spare else ""
            return self._answers([Told(question, False, f"refused: {error}{counted}", True)])
        except Exception as error:
            logging.getLogger("millpond").exception("a plan could not be made")
            return self._answers([Told(question, False, f"refused: {type(error).__name__} while planning", True)])
        self._environments |= layout.environments
        # A worker that was killed meanwhile is there again; who was to leave and has gone by itself is no concern.
        new, old = reseat(self._core, layout, wish.leaving)
        step = Step(question, new, old, wish.wanted, wish.words, wish.keeps_new)
        self._change = Rollout(self._core, step, layout.room)
        self._follows = wish, layout
        return [Told(question, True, wish.begins, False)]

    def _come_through(self) -> None:
        assert self._change is not None
        if self._follows is not None and self._change.succeeded:
            wish, layout = self._follows
            self._chosen = wish.chosen
            for name, record in layout.records.items():
                if any(child.seat in layout.seats[name] for child in self._core.children.values()):
                    model = self._core.models[name]
                    model.slots, model.context, model.kv_tokens = record.slots, record.context, record.kv_tokens
            self._keep()
        self._change, self._follows = None, None
        used = {child.seat.key for child in self._core.children.values()}
        self._environments = {key: value for key, value in self._environments.items() if key in used}

    def _keep(self) -> None:
        folders = {model.name: model.source for model in self._chosen.model}
        workers = {name: model.workers for name, model in self._core.models.items()}
        try:
            changes.write(self._place, changes.Changes(workers, folders))
        except OSError as error:
            logs.event("a restarted pool will not know of this change", logging.ERROR, reason=str(error))

    def _answers(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Told) and effect.final and effect.question != NO_QUESTION:
                self._answered[effect.question] = effect
                while len(self._answered) > ANSWERS:
                    self._answered.popitem(last=False)
        return effects


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
