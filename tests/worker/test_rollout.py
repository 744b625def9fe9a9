"""Scale, rolling restart and swap, step by step and at random: how many serve meanwhile, and what becomes of a failure."""

import inspect
import random
import sys
import types
from collections import Counter

import pytest

from worker import rollout
from worker.rollout import LOAD_S, Restart, Rollout, Step
from worker.supervision import (
    EARLY_DEATHS,
    HOPELESS_STATUS,
    Drain,
    Effect,
    Kill,
    ModelRecord,
    Seat,
    Start,
    Supervision,
    Terminate,
    Told,
)

QUESTION = b"q" * 16


def seats(model: str, count: int, key: str = "new", share: int = 10, device: str = "") -> list[Seat]:
    return [Seat(f"{key}/{model}-{n}", model, 4, share, device) for n in range(count)]


class Stage:
    """A pool whose processes do what the test says."""

    def __init__(self, workers: int = 2, share: int = 10) -> None:
        self.core = Supervision()
        self.core.plan(ModelRecord("m", 4, 100, 400), [])
        self.core.models["m"].workers = workers
        self.now = 0.0
        self.pid = 100
        self.told: list[Told] = []
        self.asked: dict[str, str] = {}
        self.change: Rollout | Restart | None = None
        for seat in seats("m", workers, "old", share):
            self.core.add(seat, 0.0, new=False)
        self.carry_out(self.core.tick(0.0))
        self.become_ready()

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(name):
                    self.pid += 1
                    self.core.started(name, self.pid, self.now)
                case Drain(name):
                    self.asked[name] = "drain"
                case Terminate(name):
                    self.asked[name] = "term"
                case Kill(name):
                    self.asked[name] = "kill"
                case Told():
                    self.told.append(effect)

    def begin(self, step: Step, room: int = 1000) -> None:
        self.change = Rollout(self.core, step, {"": room})
        self.turn()

    def roll(self, room: int = 1000, names: tuple[str, ...] = ("m-0", "m-1")) -> None:
        self.begin(Step(QUESTION, seats("m", len(names)), names, {"m": 2}, "rolled", keeps_new=True), room)

    def turn(self) -> None:
        # Twice: what the first frees, the second uses.
        for _ in range(2):
            assert self.change is not None
            self.carry_out(self.change.advance(self.now))
            self.carry_out(self.core.tick(self.now))

    def become_ready(self, *names: str) -> None:
        for name in names or [c.name for c in self.core.children.values() if c.state == "loading"]:
            self.core.ready(name)
        if self.change:
            self.turn()

    def exit(self, name: str, code: int = 0) -> None:
        self.asked.pop(name, None)
        self.carry_out(self.core.exited(name, code, self.now))
        if self.change:
            self.turn()

    def leave(self) -> list[str]:
        """Whoever was asked to leave does."""
        left = list(self.asked)
        for name in left:
            self.exit(name)
        return left

    def serving(self) -> list[str]:
        return sorted(child.seat.key for child in self.core.serving("m"))

    @property
    def states(self) -> dict[str, str]:
        return {child.name: child.state for child in self.core.children.values()}

    @property
    def end(self) -> Told | None:
        finals = [told for told in self.told if told.final]
        assert len(finals) <= 1, "it ended twice"
        return finals[0] if finals else None


def test_where_there_is_room_a_new_one_is_ready_before_an_old_one_drains() -> None:
    stage = Stage()
    stage.roll(room=30)
    assert stage.states == {"m-0": "ready", "m-1": "ready", "m-2": "loading"} and not stage.asked
    stage.become_ready("m-2")
    assert stage.asked == {"m-0": "drain"}
    # Its room is still taken, so nobody starts.
    assert stage.states == {"m-0": "stopping", "m-1": "ready", "m-2": "ready"}
    stage.exit("m-0")
    assert stage.states == {"m-0": "loading", "m-1": "ready", "m-2": "ready"}
    stage.become_ready("m-0")
    assert stage.asked == {"m-1": "drain"} and stage.end is None
    stage.exit("m-1")
    assert stage.end == Told(QUESTION, True, "rolled", True)
    assert stage.serving() == ["new/m-0", "new/m-1"] and stage.change and stage.change.succeeded


def test_without_room_one_old_one_goes_first_and_the_other_serves() -> None:
    stage = Stage()
    stage.roll(room=20)
    assert stage.asked == {"m-0": "drain"} and stage.serving() == ["old/m-1"]
    stage.exit("m-0")
    assert stage.states == {"m-0": "loading", "m-1": "ready"} and not stage.asked
    stage.become_ready()
    assert stage.asked == {"m-1": "drain"} and stage.serving() == ["new/m-0"]
    stage.exit("m-1")
    stage.become_ready()
    assert stage.serving() == ["new/m-0", "new/m-1"] and stage.end and stage.end.done


def test_the_plan_counts_what_is_wanted_and_not_what_is_there_meanwhile() -> None:
    stage = Stage()
    stage.roll()
    assert len(stage.core.children) == 3 and stage.core.model_plans()[0].workers == 2


def test_growing_starts_all_at_once_and_is_planned_at_once() -> None:
    stage = Stage(1)
    stage.begin(Step(QUESTION, seats("m", 2), [], {"m": 3}, "grown"))
    assert stage.states == {"m-0": "ready", "m-1": "loading", "m-2": "loading"}
    assert stage.core.model_plans()[0].workers == 3
    stage.become_ready()
    assert stage.end == Told(QUESTION, True, "grown", True)


def test_shrinking_drains_and_ends_when_they_have_left() -> None:
    stage = Stage(3)
    stage.begin(Step(QUESTION, [], ["m-2", "m-1"], {"m": 1}, "shrunk"))
    assert stage.asked == {"m-1": "drain", "m-2": "drain"} and stage.end is None
    stage.leave()
    assert stage.end and stage.end.done and list(stage.core.children) == ["m-0"]


def test_an_old_one_that_serves_nobody_goes_at_once_and_its_name_is_free() -> None:
    stage = Stage()
    stage.exit("m-0", -9)
    stage.roll(room=20)
    assert stage.states == {"m-0": "loading", "m-1": "ready"}
    assert stage.core.children["m-0"].seat.key == "new/m-0"
    stage.become_ready()
    stage.leave()
    stage.become_ready()
    assert stage.end and stage.end.done and stage.serving() == ["new/m-0", "new/m-1"]


def test_an_old_one_that_dies_while_it_drains_is_not_started_again() -> None:
    stage = Stage()
    stage.roll(room=30)
    stage.become_ready("m-2")
    stage.exit("m-0", -9)
    assert stage.core.children["m-0"].seat.key == "new/m-1"


@pytest.mark.parametrize("code", [HOPELESS_STATUS, 1])
def test_a_new_one_that_cannot_start_undoes_a_swap_and_the_old_ones_never_stop(code: int) -> None:
    stage = Stage()
    stage.begin(Step(QUESTION, seats("m", 2), ["m-0", "m-1"], {"m": 2}, "swapped"))
    stage.core.said("m-2", "no such weights")
    for _ in range(1 if code == HOPELESS_STATUS else EARLY_DEATHS):
        assert stage.end is None
        stage.exit("m-2", code)
        stage.now += 10.0
        stage.turn()
    assert stage.end is not None and not stage.end.done
    assert stage.end.text == f"m-2 ended with status {code} before it was ready: no such weights; it is as it was before"
    assert stage.serving() == ["old/m-0", "old/m-1"] and not stage.asked
    assert stage.core.model_plans()[0].state == "ready" and not stage.core.models["m"].failed


def test_a_swap_that_fails_half_way_brings_the_old_ones_back() -> None:
    stage = Stage()
    stage.begin(Step(QUESTION, seats("m", 2), ["m-0", "m-1"], {"m": 2}, "swapped"), room=20)
    stage.leave()
    stage.become_ready()
    assert stage.serving() == ["new/m-0"] and stage.asked == {"m-1": "drain"}
    stage.leave()
    stage.exit("m-1", HOPELESS_STATUS)
    # One old one first, beside the new one that serves; then the new one leaves for the second.
    assert stage.states == {"m-0": "ready", "m-1": "loading"} and stage.core.children["m-1"].seat.key == "old/m-0"
    stage.become_ready()
    assert stage.asked == {"m-0": "drain"}
    stage.leave()
    stage.become_ready()
    assert stage.serving() == ["old/m-0", "old/m-1"] and stage.end and not stage.end.done


def test_a_rolling_restart_that_fails_keeps_the_new_and_fills_the_place_that_is_empty() -> None:
    stage = Stage()
    stage.roll(room=20)
    stage.leave()
    stage.become_ready()
    stage.leave()
    stage.exit("m-1", HOPELESS_STATUS)
    stage.become_ready()
    assert stage.serving() == ["new/m-0", "old/m-1"] and stage.end and not stage.end.done


def test_growing_that_fails_leaves_what_was_there() -> None:
    stage = Stage(1)
    stage.begin(Step(QUESTION, seats("m", 2), [], {"m": 3}, "grown"))
    stage.become_ready("m-1")
    stage.exit("m-2", HOPELESS_STATUS)
    assert stage.asked == {"m-1": "drain"}
    stage.leave()
    assert stage.serving() == ["old/m-0"] and stage.core.model_plans()[0].workers == 1 and stage.end


def test_loading_for_ever_is_failing() -> None:
    stage = Stage()
    stage.roll()
    stage.now = LOAD_S + 1
    stage.turn()
    assert stage.asked == {"m-2": "kill"} and stage.end and "did not become ready" in stage.end.text


def test_devices_have_rooms_of_their_own() -> None:
    stage = Stage()
    step = Step(QUESTION, [*seats("m", 1, device="1"), *seats("m", 1)], [], {"m": 4}, "grown")
    stage.change = Rollout(stage.core, step, {"": 20, "1": 10})
    stage.turn()
    assert stage.states == {"m-0": "ready", "m-1": "ready", "m-2": "loading"}
    stage.become_ready()
    assert stage.asked == {"m-2": "drain"}
    stage.leave()
    # The second has no place beside the two that stay: the first is taken back.
    assert stage.end and "there is no room" in stage.end.text


def test_a_pool_that_ends_says_so() -> None:
    stage = Stage()
    stage.roll()
    assert stage.change is not None
    stage.carry_out(stage.change.abandon("the pool ends"))
    assert stage.end == Told(QUESTION, False, "the pool ends", True)
    assert stage.change.advance(0.0) == [] and stage.change.abandon("again") == []


def test_a_restart_is_over_when_all_serve_again() -> None:
    stage = Stage()
    stage.carry_out(stage.core.restart("m", 0.0))
    stage.change = Restart(stage.core, QUESTION, "m")
    stage.turn()
    assert stage.asked == {"m-0": "term", "m-1": "term"}
    stage.exit("m-0")
    stage.become_ready("m-0")
    assert stage.end is None
    stage.exit("m-1")
    stage.become_ready("m-1")
    assert stage.end == Told(QUESTION, True, "restarted m-0, m-1", True)


def beside_a_failed_one() -> Stage:
    """A pool of m, which serves, and b, whose only worker was given up."""
    stage = Stage(1)
    stage.core.plan(ModelRecord("b", 4, 100, 400), [])
    stage.core.models["b"].workers = 1
    stage.core.add(Seat("old/b-0", "b", 4, 10), 0.0, new=False)
    for _ in range(EARLY_DEATHS):
        stage.carry_out(stage.core.tick(stage.now))
        stage.carry_out(stage.core.exited("b-0", 1, stage.now))
        stage.now += 5.0
    assert stage.states == {"m-0": "ready", "b-0": "failed"} and stage.core.models["b"].failed
    return stage


@pytest.mark.parametrize("comes", [True, False])
def test_a_change_of_one_model_leaves_what_was_given_up_of_another(comes: bool) -> None:
    stage = beside_a_failed_one()
    stage.begin(Step(QUESTION, seats("m", 1), [], {"m": 2, "b": 1}, "grown"))
    if comes:
        stage.become_ready()
    else:
        stage.exit("m-1", HOPELESS_STATUS)
    assert stage.end and stage.end.done is comes and stage.core.models["m"].workers == 1 + comes
    assert [plan.state for plan in stage.core.model_plans()] == ["ready", "failed"] and stage.states["b-0"] == "failed"


def test_a_change_of_a_model_that_was_given_up_starts_all_of_it_again() -> None:
    stage = beside_a_failed_one()
    stage.begin(Step(QUESTION, seats("b", 1), [], {"m": 1, "b": 2}, "grown"))
    assert stage.states == {"m-0": "ready", "b-0": "loading", "b-1": "loading"}
    stage.become_ready()
    assert stage.end and stage.end.done and not stage.core.models["b"].failed


def test_a_restart_that_loads_for_ever_has_failed() -> None:
    stage = Stage()
    stage.carry_out(stage.core.restart("m-0", 0.0))
    stage.change = Restart(stage.core, QUESTION, "m-0")
    # What it still runs takes as long as it takes.
    stage.now = 2 * LOAD_S
    stage.turn()
    assert stage.end is None
    stage.exit("m-0")
    stage.now += LOAD_S
    stage.turn()
    assert stage.states["m-0"] == "loading" and stage.end is None
    stage.now += 1.0
    stage.turn()
    assert stage.end == Told(QUESTION, False, f"m-0 did not become ready within {LOAD_S:g} s", True)
    assert stage.change.over and not stage.change.succeeded


def test_a_restart_that_dies_late_in_loading_again_and_again_has_failed() -> None:
    stage = Stage()
    stage.carry_out(stage.core.restart("m-0", 0.0))
    stage.change = Restart(stage.core, QUESTION, "m-0")
    stage.exit("m-0")
    for _ in range(int(LOAD_S / 60.0) + 1):
        assert stage.end is None
        stage.now += 60.0
        stage.exit("m-0", 1)
        stage.now += 1.0
        stage.turn()
        if stage.end is not None:
            break
    assert stage.end == Told(QUESTION, False, f"m-0 did not become ready within {LOAD_S:g} s", True)


def test_a_restart_of_what_does_not_start_says_why() -> None:
    stage = Stage(1)
    stage.carry_out(stage.core.restart("m", 0.0))
    stage.change = Restart(stage.core, QUESTION, "m")
    stage.exit("m-0")
    stage.core.said("m-0", "out of memory")
    for _ in range(EARLY_DEATHS):
        stage.exit("m-0", 1)
        stage.now += 10
        stage.turn()
    assert stage.end == Told(QUESTION, False, "m-0 fails to start: out of memory", True)


# --- At random --------------------------------------------------------------------------------------------------------


class Walk(Stage):
    """Random orders over workers that load, leave and die at random; rules checked after every event."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        super().__init__(self.random.randint(1, 4), share=10)
        self.room = 10 * len(self.core.children) + self.random.choice([0, 0, 5, 10, 30])
        self.ends: Counter[str] = Counter()
        self.number = 0
        self.hurt = False
        self.least, self.key = 0, ""

    def order(self) -> None:
        """Some change that the room allows once it is done."""
        self.number += 1
        self.told = []
        # A death, now or before, takes what no order of things can give back.
        self.hurt = any(child.state != "ready" for child in self.core.children.values())
        names = [child.name for child in self.core.children.values() if not child.retiring]
        count = len(names)
        kind = self.random.choice(["roll", "swap", "grow", "shrink"])
        self.key = key = f"{kind}{self.number}/"
        if kind == "grow" and (count + 1) * 10 <= self.room:
            step = Step(QUESTION, seats("m", 1, key), [], {"m": count + 1}, "")
        elif kind == "shrink" and count > 1:
            step = Step(QUESTION, [], [self.random.choice(names)], {"m": count - 1}, "")
        else:
            step = Step(QUESTION, seats("m", count, key), names, {"m": count}, "", keeps_new=kind == "roll")
        self.least = min(step.wanted["m"], count)
        self.change = Rollout(self.core, step, {"": self.room})

    def event(self) -> None:
        children = [child for child in self.core.children.values() if child.pid]
        if self.change is None or self.change.over:
            if self.change is not None:
                self.finish()
            self.order()
        elif children:
            child = self.random.choice(children)
            draw = self.random.random()
            if draw < 0.03:
                self.hurt = True
                self.core.exited(child.name, self.random.choice([-9, 1, HOPELESS_STATUS]), self.now)
                self.asked.pop(child.name, None)
            elif child.name in self.asked and draw < 0.5:
                del self.asked[child.name]
                self.core.exited(child.name, 0, self.now)
            elif child.state == "loading" and draw < 0.7:
                self.core.ready(child.name)
        self.now += self.random.choice([0.0, 0.1, 1.0, 40.0])
        assert self.change is not None
        self.carry_out(self.change.advance(self.now))
        self.check()
        self.carry_out(self.core.tick(self.now))
        self.check()

    def check(self) -> None:
        children = list(self.core.children.values())
        assert sum(child.seat.share for child in children) <= self.room, "more memory than there is"
        loading = [child for child in children if child.state == "loading"]
        serving = self.core.serving("m")
        if not self.hurt:
            spare = self.room >= 10 * (self.least + 1)
            assert len(serving) >= self.least - (not spare), "too few serve"
            old = [child for child in serving if not child.seat.key.startswith(self.key)]
            assert len(loading) <= 1 or not old or "grow" in self.key, "all load at once"

    def finish(self) -> None:
        assert self.end is not None, "over without a word"
        assert self.change is not None and self.end.done == self.change.succeeded
        present = [child for child in self.core.children.values() if not child.retiring]
        assert len(present) == self.core.models["m"].workers, "more or fewer workers than planned"
        assert not self.end.done or not any(child.state == "failed" for child in present), "a failure that nobody saw"
        self.ends["done" if self.end.done else "undone"] += 1

    def settle(self) -> None:
        """Everybody behaves: the change has to end."""
        for _ in range(200):
            self.now += 40.0
            for name in list(self.asked):
                self.exit(name)
            for child in list(self.core.children.values()):
                if child.state == "loading":
                    self.core.ready(child.name)
            self.turn()
            self.check()
        assert self.change is not None and self.change.over, "a change that never ends"
        self.finish()


def walk(seed: int, steps: int = 300) -> Counter[str]:
    one = Walk(seed)
    for _ in range(steps):
        one.event()
    one.settle()
    return one.ends


@pytest.mark.slow
def test_changes_hold_under_random_walks() -> None:
    ends = sum((walk(seed) for seed in range(1, 150)), walk(0))
    assert ends["done"] > 100 and ends["undone"] > 30, ends


BROKEN = {
    "room ignored": ("return taken + seat.share <= self._room.get(seat.device, 0)", "return True"),
    "old ones leave while new ones load": ("if others >= self._wanted[child.model] or not coming:", "if True:"),
    "all new ones load at once": ("not (serving_old and self._loading()) and ", ""),
    "two old ones make room": ("not self._loading() and not self._leaving():", "not self._loading():"),
    "retired seats forgotten": ("self._retired.append(child.seat)", "pass"),
    "failures not seen": ("if failed is not None:", "if False:"),
    "a name that is given again": ("            self._old.remove(name)\n", "            pass\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rollout_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = BROKEN[name]
    source = inspect.getsource(rollout)
    assert source.count(before) == 1, "the line is not there any more"
    module = types.ModuleType("broken_rollout")
    # dataclass looks its own module up.
    monkeypatch.setitem(sys.modules, "broken_rollout", module)
    exec(compile(source.replace(before, after), "broken_rollout", "exec"), module.__dict__)
    monkeypatch.setitem(globals(), "Rollout", module.Rollout)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(150):
            walk(seed)
