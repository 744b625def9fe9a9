"""Changing the workers while they serve: the state machine of scale, rolling restart and swap (pure).

A Rollout brings up what is new and retires what is old, in an order that keeps as many workers serving as the budget
allows: while there is room beside those that serve, a new one is ready before an old one drains; where there is none, one
old one makes room first. Rules. (1) The shares of all processes on a device never exceed its room. (2) At most one new
worker loads while old ones serve. (3) No worker that serves is retired while fewer than `wanted` others of its model serve,
unless nothing can start without its room. (4) A new one that does not come up undoes the rollout: what is new is retired,
what was retired comes back. It ends exactly once, with a final Told.

Knows worker/supervision's children and nothing of processes, settings or the broker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.supervision import ChildRecord, Effect, Seat, Supervision, Told

# Loading reads a whole model from a disk; one that takes longer than this hangs.
LOAD_S = 1800.0


@dataclass(frozen=True)
class Step:
    """What a rollout is to do. question: who asked. new: seats to fill. old: names of children to retire. wanted: workers
    per model afterwards. words: what is said when it is done. keeps_new: new ones are as good as old ones, so undoing it
    only fills the places that are empty (a rolling restart)."""

    question: bytes
    new: Sequence[Seat]
    old: Sequence[str]
    wanted: Mapping[str, int]
    words: str
    keeps_new: bool = False


class Rollout:
    """One change of the pool, from its order to its end."""

    def __init__(self, core: Supervision, step: Step, room: Mapping[str, int]) -> None:
        """room: bytes by device; of seats without a share nothing is asked."""
        self._core = core
        self._step = step
        self._room = room
        self._pending = list(step.new)
        self._old = list(step.old)
        self._wanted = dict(step.wanted)
        # Models that this is about, and their workers before; of the others not even a mark is touched.
        coming = {seat.model for seat in step.new}
        counts = {name: core.models[name].workers for name in step.wanted}
        self._before = {name: n for name, n in counts.items() if name in coming or n != step.wanted[name]}
        self._added: list[str] = []
        self._ready: set[str] = set()
        self._retired: list[Seat] = []
        self._undone_because = ""
        self.over = False
        self.succeeded = False
        for name in self._before:
            core.try_again(name, step.wanted[name])

    @property
    def words(self) -> str:
        """How far it is, for whoever asks for another change meanwhile."""
        ready = f"{len(self._ready)} of {len(self._step.new)} new workers ready"
        return f"{ready}, {len(self._old)} old ones left" + (", being undone" if self._undone_because else "")

    def advance(self, now: float) -> list[Effect]:
        """Do what can be done now. Call after every event of the core, and once a second."""
        if self.over:
            return []
        effects = self._note_progress()
        self._old = [name for name in self._old if name in self._core.children]
        if not self._undone_because:
            failed = next((child for child in self._mine() if self._has_failed(child, now)), None)
            if failed is not None:
                effects += self._undo(_why(failed))
        effects += self._retire_idle()
        self._fill(now)
        effects += self._retire_serving()
        return effects + self._end()

    def abandon(self, reason: str) -> list[Effect]:
        """The pool ends: nothing more is done."""
        if self.over:
            return []
        self.over = True
        return [Told(self._step.question, False, reason, True)]

    # -- inside

    def _mine(self) -> list[ChildRecord]:
        return [self._core.children[name] for name in self._added if name in self._core.children]

    def _loading(self) -> list[ChildRecord]:
        # What was brought back and failed is supervision's affair: nobody waits for it.
        return [child for child in self._mine() if child.state not in ("ready", "failed")]

    def _note_progress(self) -> list[Effect]:
        effects: list[Effect] = []
        for child in self._mine():
            if child.state == "ready" and child.name not in self._ready:
                self._ready.add(child.name)
                effects.append(self._say(f"{child.name} is ready"))
        for name in self._old:
            if name not in self._core.children:
                effects.append(self._say(f"{name} has left"))
        return effects

    @staticmethod
    def _has_failed(child: ChildRecord, now: float) -> bool:
        return child.state == "failed" or (child.state == "loading" and now - child.started_at > LOAD_S)

    def _retire_idle(self) -> list[Effect]:
        """Old ones that serve nobody have nothing to wait for."""
        idle = [n for n in self._old if self._core.children[n].state not in ("ready", "stopping")]
        return [effect for name in idle for effect in self._retire(name)]

    def _fill(self, now: float) -> None:
        serving_old = any(name in self._core.children for name in self._old)
        while self._pending and not (serving_old and self._loading()) and self._fits(self._pending[0]):
            self._added.append(self._core.add(self._pending.pop(0), now, new=not self._undone_because))

    def _fits(self, seat: Seat) -> bool:
        if not seat.share:
            return True
        taken = sum(c.seat.share for c in self._core.children.values() if c.seat.device == seat.device)
        return taken + seat.share <= self._room.get(seat.device, 0)

    def _retire_serving(self) -> list[Effect]:
        effects: list[Effect] = []
        coming = bool(self._pending or self._loading())
        for name in list(self._old):
            child = self._core.children.get(name)
            if child is None or child.state != "ready":
                continue
            others = len(self._core.serving(child.model)) - 1
            if others >= self._wanted[child.model] or not coming:
                effects += self._retire(name)
        if self._pending and not self._loading() and not self._leaving():
            # Nothing can start beside those that serve: one of them makes room.
            device = self._pending[0].device
            here = [n for n in self._old if n in self._core.children and self._core.children[n].seat.device == device]
            if here:
                effects += self._retire(here[0])
            elif not self._undone_because:
                effects += self._undo(f"there is no room for {self._pending[0].model} beside the others")
            else:
                self._pending = []
        return effects

    def _leaving(self) -> bool:
        return any(child.retiring for child in self._core.children.values())

    def _retire(self, name: str) -> list[Effect]:
        child = self._core.children[name]
        self._retired.append(child.seat)
        effects = self._core.retire(name)
        if name not in self._core.children:
            # Its name may be given to a new one at once.
            self._old.remove(name)
        return [self._say(f"{name} finishes what it has"), *effects] if effects else []

    def _undo(self, reason: str) -> list[Effect]:
        self._undone_because = reason
        effects: list[Effect] = [self._say(f"{reason}; undoing it")]
        for child in self._mine():
            if child.state != "ready":
                effects += self._core.retire(child.name, at_once=True)
        ready = [child.name for child in self._mine() if not child.retiring]
        self._ready = set()
        self._wanted |= self._before
        for name, count in self._before.items():
            self._core.try_again(name, count)
        if self._step.keeps_new:
            self._pending, self._old = self._retired[len(ready) :], []
        else:
            # What was to leave and has not been asked yet stays.
            self._pending, self._old = self._retired, ready
        self._retired, self._added = [], []
        return effects

    def _end(self) -> list[Effect]:
        if self._pending or self._loading() or any(name in self._core.children for name in self._old):
            return []
        self.over = True
        self.succeeded = not self._undone_because
        text = self._step.words if self.succeeded else f"{self._undone_because}; it is as it was before"
        if not self.succeeded and any(child.state == "failed" for child in self._mine()):
            text = f"{self._undone_because}; what was there before does not start any more either, see millpond status"
        return [Told(self._step.question, self.succeeded, text, True)]

    def _say(self, text: str) -> Told:
        return Told(self._step.question, True, text, False)


def _why(child: ChildRecord) -> str:
    if child.state != "failed":
        return _too_slow(child)
    said = f": {child.log[-1]}" if child.log else ""
    return f"{child.name} ended with status {child.exit} before it was ready{said}"


def _too_slow(child: ChildRecord) -> str:
    return f"{child.name} did not become ready within {LOAD_S:g} s"


class Restart:
    """A restart that was asked for, until its workers are ready again: the same life as a Rollout's."""

    def __init__(self, core: Supervision, question: bytes, target: str) -> None:
        self._core = core
        self._question = question
        self.names = [
            child.name for child in core.children.values() if target in ("", child.name, child.model) and not child.retiring
        ]
        self.words = f"a restart of {target or 'all workers'}"
        # Since when a worker is neither serving nor still ending: loading, or dying late in it again and again.
        self._away: dict[str, float] = {}
        self.over = False
        self.succeeded = False

    def advance(self, now: float) -> list[Effect]:
        """Say how it ended, once."""
        if self.over:
            return []
        children = [self._core.children[name] for name in self.names]
        failed = [child for child in children if child.state == "failed"]
        slow = [child for child in children if self._is_slow(child, now)]
        if slow and not failed:
            self.over = True
            return [Told(self._question, False, _too_slow(slow[0]), True)]
        if not (failed or all(child.state == "ready" for child in children)):
            return []
        self.over = True
        self.succeeded = not failed
        if failed:
            said = f": {failed[0].log[-1]}" if failed[0].log else ""
            return [Told(self._question, False, f"{failed[0].name} fails to start{said}", True)]
        return [Told(self._question, True, f"restarted {', '.join(self.names)}", True)]

    def _is_slow(self, child: ChildRecord, now: float) -> bool:
        if child.state in ("ready", "stopping"):
            self._away.pop(child.name, None)
            return False
        begun = child.started_at if child.state == "loading" else now
        return now - self._away.setdefault(child.name, begun) > LOAD_S

    def abandon(self, reason: str) -> list[Effect]:
        """The pool ends."""
        if self.over:
            return []
        self.over = True
        return [Told(self._question, False, reason, True)]


Change = Rollout | Restart
