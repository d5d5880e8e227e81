"""What the deployment's files say, read as text: these need no engine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from practicum.cli.main import REPOSITORY

COMPOSE = REPOSITORY / "docker-compose.yml"
OVERLAYS = sorted((REPOSITORY / "infra" / "compose").glob("*.yml"))
DOCKERFILES = [  # those of our own images; the one of SGLang's starts from theirs
    path
    for path in REPOSITORY.glob("*/*/Dockerfile")
    if ".venv" not in path.parts and path.parent.name != "sglang"
]
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
PROFILE = json.loads((REPOSITORY / "infra" / "reward" / "seccomp.json").read_text())


def base_images(path: Path) -> set[str]:
    return set(re.findall(r"python:[\w.-]+@sha256:[0-9a-f]{64}", path.read_text()))


def test_base_image_when_named_is_the_same_everywhere() -> None:
    named = {str(path): base_images(path) for path in [COMPOSE, *DOCKERFILES]}
    assert len(DOCKERFILES) == 5
    assert set().union(*named.values()) == base_images(COMPOSE)
    assert all(len(images) == 1 for images in named.values()), named


def test_ports_when_published_are_the_gateways_alone() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["gateway"]
    assert SERVICES["gateway"]["ports"] == ["${PRACTICUM_BIND:-127.0.0.1}:${PRACTICUM_PORT:-8080}:8080"]


@pytest.mark.parametrize("path", [COMPOSE, *OVERLAYS], ids=lambda path: path.name)
def test_compose_file_when_read_grants_no_host(path: Path) -> None:
    for name, service in yaml.safe_load(path.read_text()).get("services", {}).items():
        assert not {"privileged", "pid", "userns_mode", "devices"} & set(service), name
        assert service.get("network_mode") != "host", name
        assert not [mount for mount in service.get("volumes", []) if "docker.sock" in str(mount)], name


@pytest.mark.parametrize("name", SERVICES)
def test_container_when_started_has_bounds_and_nothing_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert ("cap_add" in service) == (name == "reward")
    assert service["logging"]["options"]["max-size"]
    if not name.startswith("migrate-"):
        assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
        assert service["restart"] == "unless-stopped"


def test_images_when_missing_can_be_built_by_every_service_that_names_one() -> None:
    for name, service in SERVICES.items():
        assert ("build" in service) == (name not in ("redis", "postgres")), name


def test_health_check_of_reward_when_it_starts_as_root_gives_every_right_up_first() -> None:
    script = (REPOSITORY / "infra" / "reward" / "check.sh").read_text()
    before, after = script.split("exec python")
    assert "exec setpriv --reuid practicum" in before
    assert "--bounding-set=-all" in before
    assert (
        'CMD ["/usr/local/bin/check-reward"]'
        in (REPOSITORY / "services" / "reward" / "Dockerfile").read_text()
    )
    assert "HTTPConnection" in after


def test_networks_when_listed_keep_engines_and_stores_to_those_who_call_them() -> None:
    members: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for network in service["networks"]:
            members.setdefault(network, set()).add(name)
    assert members["front"] == {"gateway"}
    assert members["engines"] == {"rollout", "engine"}
    assert "gateway" not in members["stores"]
    networks = yaml.safe_load(COMPOSE.read_text())["networks"]
    assert {name for name, network in networks.items() if network.get("internal")} == {
        "services",
        "stores",
        "engines",
    }


def allowed_calls() -> set[str]:
    return {
        name
        for group in PROFILE["syscalls"]
        if group["action"] == "SCMP_ACT_ALLOW" and "args" not in group
        for name in group["names"]
    }


def test_seccomp_profile_when_it_does_not_name_a_call_refuses_it() -> None:
    assert PROFILE["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {group["action"] for group in PROFILE["syscalls"]} == {"SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"}


@pytest.mark.parametrize(
    "call",
    [
        *("bpf", "perf_event_open", "kexec_load", "init_module", "finit_module", "keyctl", "add_key"),
        *("request_key", "ptrace", "process_vm_readv", "userfaultfd", "io_uring_setup", "open_by_handle_at"),
        *("setns", "chroot", "fsopen", "fsmount", "open_tree", "move_mount", "mount_setattr", "socket"),
        *("syslog", "reboot", "swapon", "settimeofday", "clock_settime", "iopl", "quotactl", "modify_ldt"),
    ],
)
def test_seccomp_profile_when_a_call_endangers_the_host_does_not_allow_it(call: str) -> None:
    assert call not in allowed_calls()


def test_seccomp_profile_when_compared_with_dockers_adds_what_namespaces_need() -> None:
    assert {"clone", "unshare", "mount", "umount2", "pivot_root", "sethostname"} <= allowed_calls()
