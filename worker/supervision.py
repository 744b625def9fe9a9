"""When a worker process is started, restarted, given up (pure: events and `now` in, effects out).

A child is loading, ready, waiting for its restart (backoff), stopping, or gone for good (failed: its model was given up).
Before any worker of the pool was ever ready a death is the operator's affair: GiveUp. Afterwards three deaths in a row, each
within 30 s of its start, mark the model failed until restart() lifts it; other deaths only back off.

Children come by plan() or add() and go by retire(); which and when is worker/rollout's affair. One that is new and has never
been ready fails alone, without a mark on its model: whoever added it decides what then.
"""

from collections import deque
from dataclasses import dataclass, field

from common.envelope import Child, ModelPlan

# A worker that dies this soon after its start has not served; three in a row will not get better by trying.
EARLY_S = 30.0
EARLY_DEATHS = 3
BACKOFF_FIRST_S = 0.5
BACKOFF_MOST_S = 30.0
LOG_LINES = 20


@dataclass(frozen=True)
class Start:
    """Effect: start this child's process and report started()."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Effect: SIGKILL this child."""

    name: str


@dataclass(frozen=True)
class Terminate:
    """Effect: SIGTERM this child."""

    name: str


@dataclass(frozen=True)
class Drain:
    """Effect: tell this child to leave when what it runs has ended, however long that takes."""

    name: str


@dataclass(frozen=True)
class Told:
    """Effect: tell who asked this question what has happened; final: and nothing more comes."""

    question: bytes
    done: bool
    text: str
    final: bool


@dataclass(frozen=True)
class GiveUp:
    """Effect: end the pool with status 1; log are the last lines of the worker that died, exit its return code."""

    name: str
    exit: int
    log: list[str]


Effect = Start | Kill | Terminate | Drain | Told | GiveUp

# A worker that says so by its exit status cannot start with these settings and this model, however often it is tried.
HOPELESS_STATUS = 2


@dataclass(frozen=True)
class Seat:
    """What a worker process is started with: key names it in the shell. share: bytes of the device's budget that it takes,
    0 where nobody counts them. device: which of several."""

    key: str
    model: str
    slots: int = 0
    share: int = 0
    device: str = ""


@dataclass
class ChildRecord:
    """One place for a worker process, over its restarts."""

    name: str
    model: str
    seat: Seat
    state: str = "backoff"
    pid: int = 0
    started_at: float = 0.0
    restart_at: float | None = 0.0
    restarts: int = 0
    in_a_row: int = 0
    asked: bool = False  # to restart: its end is then no death
    retiring: bool = False  # it leaves for good
    new: bool = False  # added and not ready yet
    exit: int | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))


@dataclass
class ModelRecord:
    """What is planned of one model."""

    name: str
    slots: int
    context: int
    kv_tokens: int
    workers: int = 0
    early_deaths: int = 0
    failed: bool = False


class Supervision:
    """All children of one pool."""

    def __init__(self) -> None:
        self.models: dict[str, ModelRecord] = {}
        self.children: dict[str, ChildRecord] = {}
        self.ever_ready = False
        self.stopping = False

    def plan(self, model: ModelRecord, names: list[str]) -> None:
        """A model and the names of its workers; tick() starts them."""
        self.models[model.name] = model
        model.workers = len(names)
        for name in names:
            self.children[name] = ChildRecord(name, model.name, Seat(name, model.name, model.slots))

    def add(self, seat: Seat, now: float, *, new: bool = True) -> str:
        """A child more; tick() starts it. new: its failing to start is nobody's affair but the caller's."""
        number = next(n for n in range(len(self.children) + 1) if f"{seat.model}-{n}" not in self.children)
        name = f"{seat.model}-{number}"
        self.children[name] = ChildRecord(name, seat.model, seat, restart_at=now, new=new)
        return name

    def retire(self, name: str, *, at_once: bool = False) -> list[Effect]:
        """It leaves for good: when what it runs has ended, or at once; without a process it is gone already."""
        child = self.children[name]
        if not child.pid:
            del self.children[name]
            return []
        serves = child.state == "ready"
        child.state, child.retiring, child.restart_at = "stopping", True, None
        if at_once:
            return [Kill(name)]
        return [Drain(name) if serves else Terminate(name)]

    def serving(self, model: str) -> list[ChildRecord]:
        """Children of this model that take requests."""
        return [child for child in self.children.values() if child.model == model and child.state == "ready"]

    # -- events

    def started(self, name: str, pid: int, now: float) -> None:
        """The process is there and loads."""
        child = self.children[name]
        child.state, child.pid, child.started_at, child.restart_at = "loading", pid, now, None

    def said(self, name: str, line: str) -> None:
        """A line of its log."""
        self.children[name].log.append(line)

    def ready(self, name: str) -> None:
        """It has joined with its model loaded."""
        child = self.children[name]
        if child.state == "loading":
            child.state = "ready"
            child.new = False
            self.ever_ready = True

    def exited(self, name: str, code: int, now: float) -> list[Effect]:
        """Its process is gone. code: return code, negative for a signal."""
        child = self.children[name]
        child.exit, child.pid = code, 0
        if self.stopping:
            child.state, child.restart_at = "failed", None
            return []
        if child.retiring:
            del self.children[name]
            return []
        if child.asked:
            child.asked = False
            child.restarts += 1
            child.state, child.restart_at = "backoff", now
            return []
        if not self.ever_ready:
            return [GiveUp(name, code, list(child.log))]
        if child.new:
            return self._not_started(child, code, now)
        model = self.models[child.model]
        early = now - child.started_at < EARLY_S
        model.early_deaths = model.early_deaths + 1 if early else 0
        child.in_a_row = child.in_a_row + 1 if early else 1
        child.restarts += 1
        if model.failed or model.early_deaths >= EARLY_DEATHS:
            # The others that still run go on; whoever ends is not started again until restart().
            model.failed = True
            return self._fail(model)
        self._back_off(child, now)
        return []

    def _not_started(self, child: ChildRecord, code: int, now: float) -> list[Effect]:
        child.in_a_row += 1
        child.restarts += 1
        if code == HOPELESS_STATUS or child.in_a_row >= EARLY_DEATHS:
            child.state, child.restart_at = "failed", None
        else:
            self._back_off(child, now)
        return []

    @staticmethod
    def _back_off(child: ChildRecord, now: float) -> None:
        child.state = "backoff"
        child.restart_at = now + min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** (child.in_a_row - 1))

    def kill(self, name: str, pid: int) -> list[Effect]:
        """The broker found this process stuck; pid fences an order that is about an older one."""
        child = self.children.get(name)
        return [Kill(name)] if child is not None and child.pid == pid and pid else []

    def restart(self, target: str, now: float) -> list[Effect]:
        """Lift a failed mark and start afresh: a model, a worker, or everything ("")."""
        effects: list[Effect] = []
        for child in self.children.values():
            if target not in ("", child.name, child.model) or child.retiring:
                continue
            model = self.models[child.model]
            model.failed, model.early_deaths, child.in_a_row = False, 0, 0
            if child.pid:
                child.state, child.asked = "stopping", True
                effects.append(Terminate(child.name))
            elif not self.stopping:
                child.state, child.restart_at = "backoff", now
        return effects

    def try_again(self, model: str, workers: int) -> None:
        """Lift a failed mark, start what was given up with it, and plan so many workers."""
        record = self.models[model]
        record.workers, record.failed, record.early_deaths = workers, False, 0
        for child in self.children.values():
            if child.model == model and child.state == "failed" and not child.new:
                child.state, child.restart_at, child.in_a_row = "backoff", 0.0, 0

    def tick(self, now: float) -> list[Effect]:
        """What is due to start."""
        if self.stopping:
            return []
        return [
            Start(child.name)
            for child in self.children.values()
            if child.state == "backoff" and child.restart_at is not None and child.restart_at <= now
        ]

    def next_at(self) -> float | None:
        """When tick() has something to do."""
        return min((c.restart_at for c in self.children.values() if c.restart_at is not None), default=None)

    def stop(self) -> list[Effect]:
        """End everything; nothing is restarted any more."""
        self.stopping = True
        effects: list[Effect] = []
        for child in self.children.values():
            child.restart_at = None
            if child.pid:
                child.state = "stopping"
                effects.append(Terminate(child.name))
        return effects

    @property
    def living(self) -> list[str]:
        """Children with a process."""
        return [child.name for child in self.children.values() if child.pid]

    # -- for POOL_STATE

    def model_plans(self) -> list[ModelPlan]:
        """What is meant to run, per model."""
        plans = []
        for model in self.models.values():
            mine = [child for child in self.children.values() if child.model == model.name]
            ready = any(child.state == "ready" for child in mine)
            state = "failed" if model.failed and not ready else "ready" if ready else "starting"
            plans.append(ModelPlan(model.name, model.workers, model.slots, state, model.context, model.kv_tokens))
        return plans

    def child_rows(self) -> list[Child]:
        """Each child's state."""
        return [
            Child(c.name, c.model, c.pid, c.state, c.restarts, c.exit, list(c.log) if not c.pid else [])  # type: ignore[arg-type]
            for c in self.children.values()
        ]

    def _fail(self, model: ModelRecord) -> list[Effect]:
        """Nothing of this model is started any more; what still runs may go on."""
        for child in self.children.values():
            if child.model == model.name and not child.pid:
                child.state, child.restart_at = "failed", None
        return []
