"""Who may import whom, read from the sources: the folders' layers, the pure modules, and where each big library may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("common", "api", "broker", "worker", "scripts", "fixtures", "tests")

PURE = {
    "common": ["ids", "outcomes", "errors", "envelope", "generation", "histograms", "session", "settings"],
    "broker": ["settings", "records", "policy", "ledger", "roster", "switchboard", "snapshot", "waiting", "deadlines", "traces",
               "overgrown"],
    "worker": [
        "engine", "generators", "stop_matcher", "running", "sink", "router", "markers", "reasoning", "tool_calls", "placement",
        "seat", "plan", "cache_layout", "shares", "supervision", "call_syntax", "reply_grammar", "rollout",
    ],
    "api": ["abilities", "normalize", "sse", "chunks", "extract_json", "ticket", "responses", "read_json", "fields", "messages", "tools"],
}
IMPURE = {
    "asyncio", "ctypes", "falcon", "fcntl", "gunicorn", "logging", "mlx", "mlx_lm", "mlx_vlm", "multiprocessing", "os", "pathlib",
    "psutil", "queue", "random", "secrets", "select", "selectors", "signal", "socket", "subprocess", "tempfile",
    "threading", "time", "zmq",
}  # fmt: skip
# library -> the only modules that may import it ("package" means all of it)
CONFINED = {
    "zmq": {"common.sockets", "common.client", "broker.loop", "broker.__main__", "worker.link", "api.broker_link"},
    "mlx": {"worker.device", "worker.engines", "scripts.smollm2_conversion", "scripts.bench"},
    "mlx_lm": {"worker.engines", "scripts.bench", "scripts.download"},
    "mlx_vlm": {"worker.engines.diffusion"},
    "falcon": {"api.app", "api.resources"},
    "gunicorn": {"api.gunicorn_conf", "api.connections"},
    "transformers": set(),
    "torch": set(),
}  # fmt: skip


def modules(*packages: str) -> Iterator[tuple[str, Path]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    """Everything that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


@pytest.mark.parametrize("package", ["common", "api", "broker", "worker"])
def test_a_package_imports_common_and_itself_only(package: str) -> None:
    allowed = {"common", package}
    for name, path in modules(package):
        for imported in imports(path):
            top = imported.split(".")[0]
            assert top not in OURS or top in allowed, f"{name} imports {imported}"


def test_the_broker_cannot_open_payloads() -> None:
    for name, path in modules("broker"):
        assert not any(within(imported, {"common.generation"}) for imported in imports(path)), name


@pytest.mark.parametrize("package", PURE)
def test_pure_modules_touch_nothing(package: str) -> None:
    for module in PURE[package]:
        path = ROOT / package / f"{module}.py"
        touched = {name.split(".")[0] for name in imports(path)} & IMPURE
        assert not touched, f"{package}.{module} imports {touched}"


@pytest.mark.parametrize("library", CONFINED)
def test_a_library_stays_where_it_belongs(library: str) -> None:
    for name, path in modules("common", "api", "broker", "worker", "scripts", "fixtures"):
        used = any(imported.split(".")[0] == library for imported in imports(path))
        assert not used or within(name, CONFINED[library]), f"{name} imports {library}"


def test_no_file_names_a_place_that_does_not_exist() -> None:
    for package, names in PURE.items():
        for module in names:
            assert (ROOT / package / f"{module}.py").is_file(), f"{package}.{module}"
