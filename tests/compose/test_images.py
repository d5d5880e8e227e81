"""The images: whose they are, what is in them, and what is not."""

import pytest

from tests.compose import images
from tests.compose.docker import Docker

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("clone")]

_HAS_TORCH = "import importlib.util as u; print(u.find_spec('torch') is not None)"


@pytest.mark.parametrize("part", images.BUILT)
def test_image_when_run_is_not_root(docker: Docker, part: str) -> None:
    printed = docker.docker(
        "run", "--rm", "--network=none", "--entrypoint=id", f"practicum-test-{part}", "-u"
    )
    assert printed.strip() == "10001"


@pytest.mark.parametrize(
    ("part", "has_torch"), [("rollout", False), ("reward", False), ("trainer", True), ("engine", True)]
)
def test_image_when_asked_for_torch_has_it_only_where_it_computes(
    docker: Docker, part: str, has_torch: bool
) -> None:
    image = f"practicum-test-{part}"
    printed = docker.docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", _HAS_TORCH)
    assert printed.strip() == str(has_torch)


@pytest.mark.parametrize("part", images.SERVICES)
def test_image_when_imported_from_holds_all_that_its_service_needs(docker: Docker, part: str) -> None:
    code = f"import services.{part}.main"
    docker.docker(
        "run", "--rm", "--network=none", "--entrypoint=python", f"practicum-test-{part}", "-c", code
    )


@pytest.mark.parametrize("part", images.BUILT)
def test_image_when_searched_holds_nothing_of_the_building_site(docker: Docker, part: str) -> None:
    image = f"practicum-test-{part}"
    searched = (
        "ls -d /wheelhouse /source /etc/pip.conf /etc/xdg/pip /root/.config/pip /root/.cache/pip 2>/dev/null"
    )
    printed = docker.docker(
        "run", "--rm", "--user=0", "--network=none", "--entrypoint=sh", image, "-c", f"{searched}; true"
    )
    assert printed.strip() == ""
    history = docker.docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    settings = docker.docker("inspect", "--format", "{{json .Config}}", image)
    assert "PIP_" not in history + settings


@pytest.mark.parametrize(
    ("missing", "arguments", "named"),
    [
        ("seccomp profile", ["--cap-add=SYS_ADMIN"], "namespace"),
        ("capability", ["--security-opt=seccomp={profile}"], "CAP_SYS_ADMIN"),
        ("start as root", ["--security-opt=seccomp={profile}", "--user=10001"], "systempaths=unconfined"),
    ],
)
def test_reward_container_when_a_grant_is_missing_refuses_and_names_it(
    docker: Docker, clone: str, missing: str, arguments: list[str], named: str
) -> None:
    common = ["--user=0", "--cap-drop=ALL", "--cap-add=SETUID", "--cap-add=SETGID", "--cap-add=SETPCAP"]
    common += ["--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp", "--network=none"]
    given = [argument.format(profile=f"{clone}/infra/reward/seccomp.json") for argument in arguments]
    database = "--env=PRACTICUM_DATABASE_URL=sqlite:////tmp/reward.sqlite"
    printed = docker.docker("run", "--rm", *common, *given, database, "practicum-test-reward", check=False)
    assert "sandbox.held" not in printed
    assert named in printed, f"without the {missing} it said: {printed}"


def test_reward_container_when_proc_has_no_covers_needs_no_capability(docker: Docker, clone: str) -> None:
    # The other way that docs/deploy.md names. The boot check holds, then it looks for its Redis.
    printed = docker.docker(
        *("run", "--rm", "--user=10001", "--cap-drop=ALL", "--read-only", "--tmpfs=/tmp", "--network=none"),
        *("--security-opt=no-new-privileges", f"--security-opt=seccomp={clone}/infra/reward/seccomp.json"),
        "--security-opt=systempaths=unconfined",
        *("--entrypoint=python", "practicum-test-reward", "-c", _BOOT_CHECK),
    )
    assert printed.split() == ["held"] * 8


_BOOT_CHECK = """
import asyncio
from services.reward.sandbox.bubblewrap import BubblewrapSandbox
from services.reward.sandbox.self_check import require_safe

async def check():
    sandbox = BubblewrapSandbox()
    await sandbox.start()
    for _ in await require_safe(sandbox):
        print("held")
    await sandbox.close()

asyncio.run(check())
"""
