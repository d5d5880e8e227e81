"""`practicum token`: what it prints once, what it writes, and what a keyring then thinks of it."""

import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from practicum.auth.edit import add_entry, read_entries
from practicum.auth.entries import TokenEntry, sha256_of
from practicum.auth.keyring import Keyring
from practicum.auth.scopes import Scope
from practicum.cli.main import app
from practicum.clock import SystemClock
from practicum.errors import Unauthorized


def token(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["token", *arguments, "--tokens-file", str(path)])


def open_keyring(path: Path) -> Keyring:
    return Keyring.open(
        token="own", token_file=None, tokens_file=path, is_development=True, clock=SystemClock()
    )


def test_token_when_made_is_shown_once_and_opens_what_its_scopes_say(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    made = token(path, "new", "--name", "ci", "--scope", "submit", "--expires", "90d")
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    assert secret not in token(path, "list").output + token(path, "list", "--json").output
    assert open_keyring(path).identify([f"Bearer {secret}"]).scopes == (Scope.SUBMIT,)
    (entry,) = read_entries(path)
    assert entry.expires_at is not None
    assert abs(entry.expires_at - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=1)


def test_token_when_revoked_is_refused_by_a_keyring_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    answers = {
        name: json.loads(token(path, "new", "--name", name, "--scope", "operate", "--json").stdout)
        for name in ("one", "two")
    }
    keyring = open_keyring(path)
    shown = [f"Bearer {answers['one']['token']}"]
    assert keyring.identify(shown).name == "one"
    assert json.loads(token(path, "revoke", "one", "--json").stdout) == {"revoked": "one"}
    with pytest.raises(Unauthorized, match="revoked"):
        keyring.identify(shown)
    assert keyring.identify([f"Bearer {answers['two']['token']}"]).name == "two"
    listed = json.loads(token(path, "list", "--json").stdout)
    assert listed == [{"name": "two", "scopes": ["operate"], "expires_at": None, "is_over": False}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "--name", "ci", "--scope", "submit"], "has a token 'ci' already"),
        (["new", "--name", "services", "--scope", "submit"], "the services' own secret"),
        (["new", "--name", "two words", "--scope", "submit"], "--name: give"),
        (["new", "--name", "x", "--scope", "submit", "--expires", "0d"], "--expires: '0d' is no span"),
        (["new", "--name", "x", "--scope", "submit", "--expires", "1y"], "--expires: '1y' is no span"),
        (["new", "--name", "x", "--scope", "root"], "'submit'"),
        (["new", "--name", "x"], "--scope"),
        (["revoke", "nobody"], "no token 'nobody'; it has: ci"),
    ],
)
def test_command_when_it_cannot_be_done_says_why_and_leaves_the_file(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "tokens.json"
    token(path, "new", "--name", "ci", "--scope", "submit")
    before = path.read_bytes()
    refused = token(path, *arguments)
    assert refused.exit_code != 0
    assert message in refused.stderr
    assert refused.stdout == ""
    assert path.read_bytes() == before


def test_command_when_the_file_is_broken_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("{")
    for arguments in (["list"], ["revoke", "ci"], ["new", "--name", "ci", "--scope", "submit"]):
        refused = token(path, *arguments)
        assert refused.exit_code == 1
        assert f"{path}: is no JSON" in refused.stderr
    assert path.read_text() == "{"
    missing = token(tmp_path / "nowhere" / "tokens.json", "new", "--name", "ci", "--scope", "submit")
    assert "nowhere: No such file or directory" in missing.stderr


def test_file_when_others_may_read_it_stays_so_and_a_link_stays_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "tokens.json", tmp_path / "link.json"
    token(path, "new", "--name", "one", "--scope", "submit")
    os.chmod(path, 0o640)
    link.symlink_to(path)
    token(link, "new", "--name", "two", "--scope", "submit")
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in read_entries(path)] == ["one", "two"]
    assert sorted(child.name for child in tmp_path.iterdir()) == ["link.json", "tokens.json"]


def test_file_when_many_add_to_it_at_once_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    names = [f"caller-{index}" for index in range(24)]

    def add(name: str) -> None:
        add_entry(path, TokenEntry(name=name, scopes=(Scope.SUBMIT,), sha256=sha256_of(name)))

    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.name for entry in read_entries(path)) == sorted(names)


def test_command_when_the_variable_names_the_file_needs_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_TOKENS_FILE", str(tmp_path / "tokens.json"))
    made = CliRunner().invoke(
        app, ["token", "new", "--name", "ci", "--scope", "submit", "--scope", "operate"]
    )
    assert made.exit_code == 0, made.output
    assert read_entries(tmp_path / "tokens.json")[0].scopes == (Scope.SUBMIT, Scope.OPERATE)
