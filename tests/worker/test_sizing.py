"""What a worker is started with when its model is of a kind of its own, or has a draft model."""

from pathlib import Path

import pytest

from common import settings
from common.errors import ConfigError
from worker import device, sizing
from worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "probe", lambda: {"backend": device.CPU, "devices": [{"name": "test", "memory": 4 * 2**30}]})
    monkeypatch.setattr(device, "cpu_environment", lambda threads, home: {})


def started(*models: str, **chosen: str) -> dict[str, dict[str, str]]:
    """The variables of each worker."""
    given = {f"MILLPOND_{name.upper()}": value for name, value in chosen.items()}
    loaded = settings.load(WorkerSettings, given | {"MILLPOND_MODEL": ",".join(models)})
    return {name: share.environment for name, share in sizing.divide(loaded)[1].items()}


def test_a_block_diffusion_worker_has_one_slot(tiny_model: Path, tiny_diffusion_model: Path) -> None:
    workers = started(f"t={tiny_model}", f"d={tiny_diffusion_model}", slots="8")
    assert (workers["t-0"]["MILLPOND_SLOTS"], workers["d-0"]["MILLPOND_SLOTS"]) == ("8", "1")


def test_a_draft_model_takes_its_part_of_the_workers_memory(tiny_model: Path, tiny_diffusion_model: Path) -> None:
    models = (f"t={tiny_model}", f"u={tiny_model}", f"d={tiny_diffusion_model}")
    without, with_one = started(*models), started(*models, draft_model=f"t={tiny_model}")
    every = started(*models, draft_model=str(tiny_model))
    assert with_one["t-0"]["MILLPOND_DRAFT_MODEL"] == f"t={tiny_model}"
    assert (with_one["u-0"]["MILLPOND_DRAFT_MODEL"], every["d-0"]["MILLPOND_DRAFT_MODEL"]) == ("", "")
    assert every["u-0"]["MILLPOND_DRAFT_MODEL"] == f"u={tiny_model}"
    # The budget is divided by need, and this one needs more than its like without a draft.
    def shares(workers: dict[str, dict[str, str]]) -> list[int]:
        return [int(workers[name]["MILLPOND_MEMORY_SHARE"]) for name in ("t-0", "u-0")]

    assert len(set(shares(without))) == 1
    assert shares(with_one)[0] > shares(without)[0] > shares(with_one)[1]


def test_a_draft_model_that_does_not_fit_is_said(tiny_model: Path) -> None:
    # What the plan reserves for a process, and a little more than this model's weights and one conversation.
    budget = str(515 * 2**20)
    assert started(f"t={tiny_model}", memory_budget=budget)
    with pytest.raises(ConfigError, match="too little"):
        started(f"t={tiny_model}", memory_budget=budget, draft_model=str(tiny_model))


def test_a_workers_draft_is_its_own_or_that_of_all() -> None:
    chosen = settings.load(WorkerSettings, {"MILLPOND_DRAFT_MODEL": "a=/x, /y"})
    assert (chosen.draft_for("a"), chosen.draft_for("b"), WorkerSettings().draft_for("a")) == ("/x", "/y", "")
    with pytest.raises(ConfigError, match="MILLPOND_DRAFT_MODEL="):
        settings.load(WorkerSettings, {"MILLPOND_DRAFT_MODEL": "=/x"})
