"""Which workers run on which device, and how the budget of each is divided between models (pure).

Owns the placing of workers and the models' shares; what one worker does with its share is worker/plan's. Must never know
files or how a device is asked. Invariant: on every device the shares of its workers add up to no more than its budget,
and a model's workers are all alike, so that the broker may take any of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from worker.model_files import ModelFacts
from worker.plan import AUTO, FLOAT32, KEEP, Needs, Plan, needs, plan, size


@dataclass(frozen=True)
class Device:
    """A device and the bytes of it that may be used."""

    index: int
    name: str
    budget_bytes: int


@dataclass(frozen=True)
class Wish:
    """What is asked for one model. workers None: as many as suit the devices. share: its part of each device; None: what
    it needs. context 0: the model's own. prompt_cache_bytes: of each worker; 0: an eighth of its share. beside_bytes: of
    each worker, for its draft model."""

    model: str
    facts: ModelFacts
    workers: int | None = None
    share: float | None = None
    slots: int = 16
    context: int = 0
    prompt_cache_bytes: int = 0
    beside_bytes: int = 0

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return min(self.context or self.facts.context, self.facts.context)


@dataclass(frozen=True)
class Placed:
    """A model's workers: the plan of each, and the device of each. fits: how many would fit on each device, were the
    model alone there."""

    model: str
    plan: Plan
    context: int
    devices: tuple[int, ...]
    fits: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """How a machine computes. one_each: its devices compute side by side, so that one worker of a model on each gains."""

    on_cpu: bool = False
    one_each: bool = False
    cpu_weights: str = AUTO


def place(devices: Sequence[Device], wishes: Sequence[Wish], kind: Kind) -> list[Placed]:
    """Workers of every model. Raises ConfigError saying what does not fit and by how much."""
    given = sum(wish.share or 0 for wish in wishes)
    if given > 1.000001:
        raise ConfigError(f"MILLPOND_SHARE: the models' shares add up to {given:g}, more than the whole budget")
    board = _Board(devices, wishes, kind)
    for wish in sorted(wishes, key=lambda wish: -board.least(wish)):
        for number in range(wish.workers or 1):
            board.add(wish, number)
    if kind.one_each:
        for wish in wishes:
            if wish.workers is None:
                board.spread(wish)
    return [board.placed(wish) for wish in wishes]


class _Board:
    """How many workers of each model are on each device."""

    def __init__(self, devices: Sequence[Device], wishes: Sequence[Wish], kind: Kind) -> None:
        self._devices = devices
        self._wishes = {wish.model: wish for wish in wishes}
        self._kind = kind
        self._counts: list[Counter[str]] = [Counter() for _ in devices]
        self._order: dict[str, list[int]] = {wish.model: [] for wish in wishes}

    # -- one model

    def _needs(self, wish: Wish, wanted: bool = False) -> Needs:
        """In the precision that it would like to have, or else in the least."""
        precision = KEEP
        if self._kind.on_cpu and (self._kind.cpu_weights == FLOAT32 or (wanted and self._kind.cpu_weights == AUTO)):
            precision = FLOAT32
        return needs(wish.facts, precision, wish.slots, wish.beside_bytes)

    def least(self, wish: Wish) -> int:
        """Bytes without which a worker of it is of no use."""
        return self._needs(wish).least(wish.longest)

    def _most(self, wish: Wish) -> int:
        return max(self._needs(wish, wanted=True).most(wish.slots, wish.longest), self.least(wish))

    # -- one device

    def _reserved(self, device: Device, counts: Counter[str]) -> dict[str, int]:
        """Bytes that each model there cannot do without: its share where one is given, else what its workers need."""
        return {
            model: int(wish.share * device.budget_bytes) if wish.share is not None else self.least(wish) * counts[model]
            for model, wish in self._wishes.items()
            if counts[model]
        }

    def _free(self, device: Device, counts: Counter[str]) -> int:
        """Bytes left, less than 0 if what is there does not fit."""
        reserved = self._reserved(device, counts)
        left = device.budget_bytes - sum(reserved.values())
        inside = [given - self.least(self._wishes[model]) * counts[model] for model, given in reserved.items()]
        return min([left, *(spare for spare in inside if spare < 0)])

    def _with(self, place: int, model: str) -> Counter[str]:
        return self._counts[place] + Counter({model: 1})

    # -- placing

    def add(self, wish: Wish, number: int) -> None:
        """One more worker, where it finds the fewest of its kind and the most room."""
        free = [self._free(device, self._with(place, wish.model)) for place, device in enumerate(self._devices)]
        able = [place for place, left in enumerate(free) if left >= 0]
        if not able:
            self._refuse(wish, number, max(free))
        best = min(able, key=lambda place: (self._counts[place][wish.model], -free[place]))
        self._put(best, wish.model)

    def spread(self, wish: Wish) -> None:
        """One more on every device without one, where it fits."""
        for place, device in enumerate(self._devices):
            if not self._counts[place][wish.model] and self._free(device, self._with(place, wish.model)) >= 0:
                self._put(place, wish.model)

    def _put(self, place: int, model: str) -> None:
        self._counts[place][model] += 1
        self._order[model].append(place)

    def _refuse(self, wish: Wish, number: int, lacking: int) -> None:
        budget = max(device.budget_bytes for device in self._devices)
        whole = f"{size(budget)}" + (f" on each of {len(self._devices)} devices" if len(self._devices) > 1 else "")
        others = ", beside the other models" if len(self._wishes) > 1 else ""
        raise ConfigError(
            f"worker {number + 1} of {wish.workers or 1} of model {wish.model!r} needs {size(self.least(wish))}, and "
            f"the budget is {whole}{others}: {size(-lacking)} too little; "
            "raise MILLPOND_MEMORY_BUDGET or lower MILLPOND_WORKERS"
        )

    # -- dividing

    def _shares(self, device: Device, counts: Counter[str]) -> dict[str, int]:
        """Bytes of each model on a device: its share, or what it needs and, as far as that goes, all that it could use."""
        shares = self._reserved(device, counts)
        free = device.budget_bytes - sum(shares.values())
        open_ = {model: self._wishes[model] for model in shares if self._wishes[model].share is None}
        gaps = {model: self._most(wish) * counts[model] - shares[model] for model, wish in open_.items()}
        total = sum(gaps.values())
        for model, gap in gaps.items():
            shares[model] += min(gap, free * gap // total) if total else 0
        rest, whole = device.budget_bytes - sum(shares.values()), sum(shares[model] for model in open_)
        for model in open_:
            # What nobody has a use for goes into prompt caches.
            shares[model] += rest * shares[model] // whole
        return shares

    def placed(self, wish: Wish) -> Placed:
        """The model's plan: what the device allows where it has the least."""
        each = []
        for device, counts in zip(self._devices, self._counts, strict=True):
            if counts[wish.model]:
                each.append(self._shares(device, counts)[wish.model] // counts[wish.model])
        order = self._order[wish.model]
        made = plan(
            min(each) * len(order),
            wish.facts,
            len(order),
            wish.slots,
            wish.longest,
            on_cpu=self._kind.on_cpu,
            cpu_weights=self._kind.cpu_weights,
            prompt_cache_bytes=wish.prompt_cache_bytes,
            beside=wish.beside_bytes,
        )
        # As they will be held: float32 may fit fewer times than what is stored.
        least = needs(wish.facts, made.precision, wish.slots, wish.beside_bytes).least(wish.longest)
        part = 1.0 if wish.share is None else wish.share
        fits = tuple(int(part * device.budget_bytes) // least for device in self._devices)
        return Placed(wish.model, made, wish.longest, tuple(self._devices[place].index for place in order), fits)
