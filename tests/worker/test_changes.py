"""Orders: what they mean for the pool, and what is refused with which figures. Plans are made over real model folders."""

import dataclasses
from pathlib import Path

import pytest

from common import changes as kept
from common import runtime
from common.envelope import Order
from common.errors import ConfigError
from common.models import ModelChoice
from worker import device, sizing
from worker.changes import Changes
from worker.layout import lay_out, reseat, seated
from worker.settings import WorkerSettings
from worker.supervision import Drain, Seat, Start, Supervision, Terminate, Told

GIB = 2**30
QUESTION = b"q" * 16


def order(action: str, target: str = "m", count: int = 0, source: str = "", question: bytes = QUESTION) -> Order:
    return Order(action, target, count, "asked by a command", question, source)  # type: ignore[arg-type]


@pytest.fixture
def chosen(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerSettings:
    """A CPU whose devices need not be asked."""
    monkeypatch.setattr(device, "probe", lambda: {"backend": device.CPU, "devices": [{"name": "test", "memory": 4 * GIB}]})
    monkeypatch.setattr(device, "cpu_environment", lambda threads, home: {})
    return WorkerSettings(model=[ModelChoice("m", str(tiny_model))], memory_budget=4 * GIB, home=str(tmp_path))


class Pool:
    """Changes over children that are ready as soon as they start."""

    def __init__(self, chosen: WorkerSettings, folder: Path) -> None:
        self.place = runtime.runtime(8080, str(folder))
        runtime.create(self.place)
        layout = lay_out(chosen, 0)
        self.core = seated(layout)
        self.changes = Changes(chosen, self.core, layout, self.place, lambda: None)
        self.told: list[Told] = []
        self.now = 0.0
        self.turn()

    def turn(self) -> None:
        for _ in range(50):
            for effect in [*self.changes.advance(self.now), *self.core.tick(self.now)]:
                self.carry_out(effect)

    def carry_out(self, effect: object) -> None:
        match effect:
            case Start(name):
                assert self.changes.environment(self.core.children[name].seat.key)["MILLPOND_MODEL"].startswith("m=")
                self.core.started(name, 1, self.now)
                self.core.ready(name)
            case Drain(name):
                self.core.exited(name, 0, self.now)
            case Told():
                self.told.append(effect)

    def do(self, order: Order) -> Told:
        self.told = []
        for effect in self.changes.obey(order, self.now):
            self.carry_out(effect)
        if self.changes._planning is not None:
            self.changes._planning[2].exception(30)
        self.turn()
        finals = [told for told in self.told if told.final]
        assert len(finals) == 1, self.told
        return finals[0]


def test_scaling_divides_the_budget_anew_and_what_has_too_much_makes_room(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(chosen, tmp_path / "r")
    assert pool.core.children["m-0"].seat.share == 4 * GIB
    told = pool.do(order("scale", count=2))
    assert told == Told(QUESTION, True, "m has 2 workers", True), pool.told
    assert [child.seat.share for child in pool.core.children.values()] == [2 * GIB, 2 * GIB]
    assert kept.read(pool.place).workers == {"m": 2}


def test_what_does_not_fit_is_refused_with_figures_and_nothing_changes(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(chosen, tmp_path / "r")
    before = dict(pool.core.children)
    told = pool.do(order("scale", count=9))
    assert not told.done and told.text.startswith("refused: worker 8 of 9 of model 'm' needs 0.50 GiB, and the budget is 4.00 GiB")
    assert pool.core.children == before and pool.core.models["m"].workers == 1 and not kept.read(pool.place).workers
    assert pool.do(order("scale", count=2, question=b"r" * 16)).done


def test_spare_room_is_kept_for_a_replacement(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(dataclasses.replace(chosen, spare_workers=1), tmp_path / "r")
    assert list(pool.core.children) == ["m-0"] and pool.core.children["m-0"].seat.share == 2 * GIB
    assert pool.do(order("roll", "")).done
    said = [told.text for told in pool.told]
    assert said.index("m-1 is ready") < said.index("m-0 finishes what it has")


def test_a_swap_is_kept_and_its_plan_counts(chosen: WorkerSettings, tiny_sentencepiece_model: Path, tmp_path: Path) -> None:
    pool = Pool(chosen, tmp_path / "r")
    told = pool.do(order("swap", source=str(tiny_sentencepiece_model)))
    assert told.done and told.text == f"m is served from {tiny_sentencepiece_model}"
    (child,) = pool.core.children.values()
    assert pool.changes.environment(child.seat.key)["MILLPOND_MODEL"] == f"m={tiny_sentencepiece_model}"
    again = kept.read(pool.place).models(chosen.model)
    assert again == [ModelChoice("m", str(tiny_sentencepiece_model))]
    assert pool.do(order("scale", count=2, question=b"r" * 16)).done
    assert all(
        pool.changes.environment(child.seat.key)["MILLPOND_MODEL"].endswith(str(tiny_sentencepiece_model))
        for child in pool.core.children.values()
    )


def test_draining_takes_the_one_that_was_named(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(dataclasses.replace(chosen, workers=[("m", 3)]), tmp_path / "r")
    assert pool.do(order("drain", "m-1")).text == "m-1 has left; m has 2 workers"
    assert list(pool.core.children) == ["m-0", "m-2"] and pool.core.models["m"].workers == 2
    assert pool.do(order("drain", "m-0", question=b"r" * 16)).done
    told = pool.do(order("drain", "m-2", question=b"s" * 16))
    assert not told.done and "is the only worker of m" in told.text


def test_a_question_that_comes_again_has_the_same_answer(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(chosen, tmp_path / "r")
    first = pool.do(order("scale", count=2))
    assert pool.changes.obey(order("scale", count=2), 0.0) == [first]
    # While it is under way it is the same order and begins nothing.
    pool.changes.obey(order("scale", count=3, question=b"r" * 16), 0.0)
    assert pool.changes.obey(order("scale", count=3, question=b"r" * 16), 0.0) == []
    (refused,) = pool.changes.obey(order("scale", count=1, question=b"s" * 16), 0.0)
    assert isinstance(refused, Told) and refused.text == "another change is under way: a plan is made"
    (ended,) = pool.changes.abandon("the pool ends")
    assert ended == Told(b"r" * 16, False, "the pool ends", True)


def test_nothing_is_changed_before_the_first_worker_was_ready(chosen: WorkerSettings, tmp_path: Path) -> None:
    layout = lay_out(chosen, 0)
    changes = Changes(chosen, seated(layout), layout, runtime.runtime(8080, str(tmp_path)), lambda: None)
    (told,) = changes.obey(order("scale", count=2), 0.0)
    assert isinstance(told, Told) and told.text == "the pool is still starting"


def test_whoever_has_no_more_than_the_plan_gives_stays() -> None:
    core = Supervision()
    layout = sizing_layout(share=10, count=2)
    for share in (10, 15, 5):
        core.add(Seat("old", "m", 4, share), 0.0)
    new, old = reseat(core, layout)
    assert [seat.key for seat in new] == [] and old == ["m-1"]
    new, old = reseat(core, layout, {"m-0"})
    assert len(new) == 1 and sorted(old) == ["m-0", "m-1"]


def sizing_layout(share: int, count: int):  # type: ignore[no-untyped-def]
    from worker.layout import Layout

    return Layout({}, {"m": [Seat(f"new/{n}", "m", 4, share) for n in range(count)]}, {}, {"": share * count})


def test_what_was_kept_is_read_over_the_settings_and_a_foreign_file_is_refused(tmp_path: Path) -> None:
    place = runtime.runtime(8080, str(tmp_path / "r"))
    runtime.create(place)
    assert kept.read(place) == kept.Changes()
    kept.write(place, kept.Changes({"m": 3}, {"m": "/new"}))
    found = kept.read(place)
    assert found.workers == {"m": 3}
    assert found.models([ModelChoice("m", "/old"), ModelChoice("o", "/o")]) == [ModelChoice("m", "/new"), ModelChoice("o", "/o")]
    place.changes.write_text("[]")
    with pytest.raises(ConfigError, match="remove it"):
        kept.read(place)


def test_the_brokers_own_wish_names_a_process_and_is_carried_out_each_time(chosen: WorkerSettings, tmp_path: Path) -> None:
    pool = Pool(chosen, tmp_path / "r")
    for pid in (1, 2, 3):
        own = Order("restart", "m-0", pid, "over its share of memory")
        assert Terminate("m-0") in pool.changes.obey(own, pool.now)
        # It is said again while the process ends, and means this process and no later one.
        assert not pool.changes.obey(own, pool.now)
        pool.core.exited("m-0", 0, pool.now)
        pool.core.started("m-0", pid + 1, pool.now)
        pool.core.ready("m-0")
        pool.turn()
        assert not pool.changes.obey(own, pool.now)


def test_the_plan_is_the_budgets(chosen: WorkerSettings) -> None:
    # What is laid out is what sizing divides; the room is the whole of it.
    core, shares = sizing.divide(chosen)
    layout = lay_out(chosen, 7)
    assert layout.room == {"": int(shares["m-0"].environment["MILLPOND_MEMORY_SHARE"])}
    assert [seat.key for seat in layout.seats["m"]] == ["7/m-0"] and layout.records["m"].slots == core.models["m"].slots
