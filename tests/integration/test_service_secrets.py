"""Every service's own process refuses a weak secret outside development, and says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("service", ["reward", "rollout", "trainer"])
def test_service_when_its_secret_is_short_in_production_ends_with_a_message(
    service: str, tmp_path: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRACTICUM_")}
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}.main"],
        env={
            **environment,
            "PRACTICUM_ENVIRONMENT": "production",
            "PRACTICUM_TOKEN": "s3cr3t-too-short",
            "PRACTICUM_REDIS_URL": "redis://:a-password@127.0.0.1:1/0",
            "PRACTICUM_DATABASE_URL": f"sqlite:///{tmp_path}/db.sqlite",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "PRACTICUM_TOKEN has under 24 characters; make one with: openssl rand -hex 32" in done.stderr
    assert "s3cr3t" not in done.stderr
    assert not any(tmp_path.iterdir())
