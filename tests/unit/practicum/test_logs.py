"""Structured logs: one JSON object a line, and no secret in a traceback."""

import json

import pytest
import structlog

from practicum.telemetry.logs import configure_logs, get_logger


def fail_with(secret: str) -> None:
    header = {"Authorization": f"Bearer {secret}"}
    raise ValueError(f"refused after {len(header)} headers")


def test_log_when_an_error_is_logged_shows_frames_without_their_locals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logs("test", "info")
    try:
        try:
            fail_with("s3cr3t-value")
        except ValueError as error:
            get_logger("room").error("request.failed", exc_info=error)
        line = capsys.readouterr().err.strip()
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert "s3cr3t-value" not in line
    record = json.loads(line)
    assert (record["event"], record["service"], record["room"]) == ("request.failed", "test", "room")
    assert record["exception"][0]["exc_value"] == "refused after 1 headers"
    assert record["exception"][0]["frames"][-1]["name"] == "fail_with"
