"""Who sits where: the plan's workers as seats, and which of the present ones a new plan leaves in place.

The bridge between worker/sizing, which divides the budget, and worker/rollout, which knows only seats. Starts nothing and
decides nothing about order. Raises ConfigError when the budget does not hold what is asked for.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from common import settings
from worker import sizing
from worker.settings import WorkerSettings
from worker.supervision import ChildRecord, ModelRecord, Seat, Supervision

# What tells a worker's device, on machines with several.
DEVICE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Layout:
    """seats per model, as many as it is to have workers; environments by the seats' keys; room: bytes by device, with what
    is kept free for a worker more (MILLPOND_SPARE_WORKERS)."""

    records: Mapping[str, ModelRecord]
    seats: Mapping[str, list[Seat]]
    environments: Mapping[str, dict[str, str]]
    room: Mapping[str, int]


def lay_out(chosen: WorkerSettings, number: int) -> Layout:
    """The seats of a plan; number: tells its keys from those of other plans. Raises ConfigError."""
    core, shares = sizing.divide(chosen)
    counts = {name: sum(child.model == name for child in core.children.values()) for name in core.models}
    if chosen.spare_workers:
        wider = [(name, count + chosen.spare_workers) for name, count in counts.items()]
        core, shares = sizing.divide(dataclasses.replace(chosen, workers=wider))
    seats: dict[str, list[Seat]] = {name: [] for name in core.models}
    environments: dict[str, dict[str, str]] = {}
    room: dict[str, int] = {}
    for name, child in core.children.items():
        environment = shares[name].environment
        share = int(environment[settings.environment_name("memory_share")])
        device = environment.get(DEVICE, "")
        room[device] = room.get(device, 0) + share
        if len(seats[child.model]) < counts[child.model]:
            seat = Seat(f"{number}/{name}", child.model, core.models[child.model].slots, share, device)
            seats[child.model].append(seat)
            environments[seat.key] = environment
    return Layout(core.models, seats, environments, room)


def seated(layout: Layout) -> Supervision:
    """A pool in which every seat has its worker to start."""
    core = Supervision()
    for name, record in layout.records.items():
        core.plan(record, [])
        record.workers = len(layout.seats[name])
        for seat in layout.seats[name]:
            core.add(seat, 0.0, new=False)
    return core


def reseat(core: Supervision, layout: Layout, leaving: Collection[str] = ()) -> tuple[list[Seat], list[str]]:
    """(seats to fill, children to retire) on the way to a layout. Whoever has no larger share than the layout gives stays,
    except those in `leaving`."""
    new: list[Seat] = []
    old: list[str] = []
    for model, seats in layout.seats.items():
        free = list(seats)
        present = [child for child in core.children.values() if child.model == model and not child.retiring]
        for child in sorted(present, key=_worth):
            place = None if child.name in leaving else next((seat for seat in free if _suits(child.seat, seat)), None)
            if place is None:
                old.append(child.name)
            else:
                free.remove(place)
        new += free
    return new, old


def _worth(child: ChildRecord) -> tuple[bool, int, str]:
    """Who serves stays before who does not, and the older before the younger."""
    return child.state != "ready", len(child.name), child.name


def _suits(has: Seat, gets: Seat) -> bool:
    return has.device == gets.device and has.share <= gets.share
