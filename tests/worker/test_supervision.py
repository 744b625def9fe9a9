"""When workers are restarted and when they are given up."""

from worker.supervision import (
    BACKOFF_FIRST_S,
    EARLY_S,
    GiveUp,
    Kill,
    ModelRecord,
    Start,
    Supervision,
    Terminate,
)


def pool(workers: int = 1) -> Supervision:
    core = Supervision()
    core.plan(ModelRecord("m", 16, 8192, 1000), [f"m-{i}" for i in range(workers)])
    return core


def start(core: Supervision, name: str = "m-0", pid: int = 100, now: float = 0.0, ready: bool = True) -> None:
    assert Start(name) in core.tick(now)
    core.started(name, pid, now)
    if ready:
        core.ready(name)


def test_planned_workers_start_at_once_and_only_once() -> None:
    core = pool(2)
    assert core.tick(0.0) == [Start("m-0"), Start("m-1")]
    core.started("m-0", 1, 0.0)
    core.started("m-1", 2, 0.0)
    assert core.tick(0.0) == []


def test_before_the_first_was_ready_a_death_ends_the_pool_with_its_log() -> None:
    core = pool()
    start(core, ready=False)
    core.said("m-0", "no such weights")
    assert core.exited("m-0", 2, 1.0) == [GiveUp("m-0", 2, ["no such weights"])]


def test_a_late_death_backs_off_and_starts_again() -> None:
    core = pool()
    start(core)
    assert core.exited("m-0", -9, 100.0) == []
    assert core.tick(100.0) == []
    assert core.tick(100.0 + BACKOFF_FIRST_S) == [Start("m-0")]
    assert core.child_rows()[0].exit == -9 and core.child_rows()[0].restarts == 1


def test_three_early_deaths_in_a_row_fail_the_model_until_restart() -> None:
    core = pool()
    now = 0.0
    for death in range(3):
        start(core, pid=death + 1, now=now)
        now += 1.0
        assert core.exited("m-0", 1, now) == []
        now += 60.0 if death < 2 else 0.0
    assert core.model_plans()[0].state == "failed" and core.tick(now + 1000) == []
    core.restart("m", now)
    assert core.model_plans()[0].state == "starting" and core.tick(now) == [Start("m-0")]


def test_the_survivors_of_a_failed_model_serve_on_and_are_not_replaced() -> None:
    core = pool(2)
    start(core, "m-1", 50)
    now = 0.0
    for death in range(3):
        start(core, pid=death + 1, now=now)
        core.exited("m-0", 1, now + 1.0)
        now += 60.0
    assert core.model_plans()[0].state == "ready"
    core.exited("m-1", -9, now)
    assert core.model_plans()[0].state == "failed" and core.tick(now + 100) == []
    core.restart("m-1", now)
    assert core.tick(now) == [Start("m-1")]


def test_a_death_after_a_long_life_forgives_the_early_ones() -> None:
    core = pool()
    now = 0.0
    for lived in (1.0, 1.0, EARLY_S + 1, 1.0, 1.0):
        start(core, now=now)
        now += lived
        core.exited("m-0", 1, now)
        now += 60.0
    assert core.model_plans()[0].state == "starting"


def test_backoff_doubles_with_early_deaths() -> None:
    core = pool()
    start(core)
    core.exited("m-0", 1, 1.0)
    start(core, now=1.0 + BACKOFF_FIRST_S)
    core.exited("m-0", 1, 2.0 + BACKOFF_FIRST_S)
    assert core.next_at() == 2.0 + 3 * BACKOFF_FIRST_S


def test_an_order_to_kill_an_older_process_does_nothing() -> None:
    core = pool()
    start(core, pid=7)
    assert core.kill("m-0", 6) == [] and core.kill("other", 7) == []
    assert core.kill("m-0", 7) == [Kill("m-0")]


def test_a_restart_on_request_is_no_death() -> None:
    core = pool()
    start(core)
    for now in (1.0, 2.0, 3.0, 4.0):
        assert core.restart("", now) == [Terminate("m-0")]
        assert core.exited("m-0", 0, now) == []
        start(core, now=now)
    assert core.model_plans()[0].state == "ready"


def test_stopping_ends_all_and_restarts_none() -> None:
    core = pool(2)
    start(core, "m-0", 1)
    assert core.stop() == [Terminate("m-0")]
    assert core.exited("m-0", 0, 1.0) == [] and core.living == [] and core.tick(1000.0) == []
