"""The files in docs/deploy are what their readers take them for, and name what is there."""

import argparse
import configparser
import plistlib
import re
import subprocess
from pathlib import Path

import pytest

from scripts import options
from scripts.instance import MARGIN_S
from worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
# Of API and pool, one after the other; the broker needs no time of its own.
DRAIN_S = 2 * (WorkerSettings().shutdown_timeout + MARGIN_S)


def unit() -> dict[str, list[str]]:
    """Values by "Section.Key"."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (DEPLOY / "millpond.service").read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals and key.isalnum(), line
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def is_a_command(words: list[str]) -> None:
    """millpond serve with flags that there are."""
    assert words[0].endswith("/.venv/bin/millpond") and words[1] == "serve", words
    allowed = {"--config", *("--" + field.name.replace("_", "-") for field in options.declared())}
    assert {word for word in words if word.startswith("--")} <= allowed


def test_the_systemd_unit_starts_what_is_there_waits_for_drains_and_is_hardened() -> None:
    values = unit()
    is_a_command(values["Service.ExecStart"][0].split())
    assert float(values["Service.TimeoutStopSec"][0]) >= DRAIN_S
    assert values["Service.KillMode"] == ["mixed"] and values["Service.RestartPreventExitStatus"] == ["2"]
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictNamespaces", "LockPersonality"):
        assert values[f"Service.{name}"] == ["yes"], name
    assert values["Service.ProtectSystem"] == ["strict"] and values["Service.CapabilityBoundingSet"] == [""]
    assert "MILLPOND_RUNTIME=/run/millpond" in values["Service.Environment"]
    configparser.ConfigParser(strict=False, interpolation=None).read(DEPLOY / "millpond.service")


def test_the_launchd_plist_is_one_and_starts_what_is_there() -> None:
    plist = plistlib.loads((DEPLOY / "org.millpond.serve.plist").read_bytes())
    is_a_command(plist["ProgramArguments"])
    assert plist["Label"] == "org.millpond.serve" and plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ExitTimeOut"] >= DRAIN_S and plist["Umask"] == 0o077
    config = Path(plist["ProgramArguments"][3])
    assert (ROOT / config.relative_to("/opt/millpond")).is_file()


def test_the_settings_file_holds_settings(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_flags(parser)
    found = options.resolved(parser.parse_args(["--config", str(DEPLOY / "millpond.toml")]), {})
    assert found["MILLPOND_MODEL"] == "chat=/srv/models/chat" and found["MILLPOND_SPARE_WORKERS"] == "1"


def test_the_containerfile_copies_what_is_there_and_all_that_is_needed() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    steps = re.sub(r"\\\n", " ", text)
    copied = {source for line in re.findall(r"^COPY (.+)$", steps, re.MULTILINE) for source in line.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= copied and "setup.cfg" in copied
    assert re.search(r"^ENTRYPOINT \[\"millpond\", \"serve\"\]$", steps, re.MULTILINE)
    assert re.search(r"^USER millpond$", steps, re.MULTILINE) and "STOPSIGNAL SIGTERM" in steps
    settings = {f"MILLPOND_{field.name.upper()}" for field in options.declared()}
    assert set(re.findall(r"(MILLPOND_[A-Z_]+)=", steps)) <= settings


@pytest.mark.slow
def test_the_containers_editable_install_finds_every_package() -> None:
    # What COPY leaves out (tests, .ci) is not named by setup.cfg either.
    listed = subprocess.run(
        ["git", "ls-files", "--", "*/__init__.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    named = set((ROOT / "setup.cfg").read_text().split())
    assert {path.split("/")[0] for path in listed} - {"tests"} <= named
