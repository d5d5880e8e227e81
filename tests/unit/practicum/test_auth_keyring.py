"""The keyring: whom it lets in, and files that change under it."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from practicum.auth.entries import sha256_of
from practicum.auth.keyring import Caller, Keyring
from practicum.auth.scopes import Scope
from practicum.clock import SystemClock
from practicum.errors import Forbidden, Unauthorized

OWN = "the-services-own-secret-of-the-test"
NEXT = "the-secret-that-comes-after-it"


class MovedClock(SystemClock):
    """The time of day, moved."""

    def __init__(self) -> None:
        self.moved = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.moved


def write_tokens(path: Path, **scopes: str) -> None:
    """Each name is its own secret."""
    tokens = [{"name": name, "scopes": [scope], "sha256": sha256_of(name)} for name, scope in scopes.items()]
    path.write_text(json.dumps({"tokens": tokens}))


def opened(*, token_file: Path | None = None, tokens_file: Path | None = None) -> Keyring:
    return Keyring.open(
        token=OWN,
        token_file=token_file,
        tokens_file=tokens_file,
        is_development=False,
        clock=SystemClock(),
    )


def knows(keyring: Keyring, secret: str) -> bool:
    try:
        keyring.identify([f"Bearer {secret}"])
    except Unauthorized:
        return False
    return True


def test_caller_when_known_has_the_name_and_scopes_of_the_token(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.json", ci="submit")
    keyring = opened(tokens_file=tmp_path / "tokens.json")
    assert keyring.identify(["Bearer ci"]) == Caller(name="ci", scopes=(Scope.SUBMIT,))
    assert keyring.identify([f"Bearer {OWN}"]) == Caller(name="services", scopes=(Scope.INTERNAL,))
    with pytest.raises(Forbidden, match="needs the scope 'operate'; the token 'ci' has submit"):
        keyring.identify(["Bearer ci"]).require(Scope.OPERATE)


@pytest.mark.parametrize(
    "headers", [["bearer ci"], ["BEARER ci"], ["Bearer   ci "], [" Bearer ci"]], ids=lambda header: header[0]
)
def test_header_when_written_otherwise_is_read(tmp_path: Path, headers: list[str]) -> None:
    write_tokens(tmp_path / "tokens.json", ci="submit")
    assert opened(tokens_file=tmp_path / "tokens.json").identify(headers).name == "ci"


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "show a token"),
        ([""], "show a token"),
        (["Bearer"], "show a token"),
        (["Bearer "], "show a token"),
        (["ci"], "show a token"),
        (["Basic ci"], "show a token"),
        (["Bearer\tci"], "show a token"),
        (["Bearer ci", "Bearer ci"], "several Authorization headers"),
        (["Bearer nobody", "Bearer ci"], "several Authorization headers"),
        (["Bearer ci, Bearer ci"], "not known"),
        (["Bearer ci x"], "not known"),
        (["Bearer CI"], "not known"),
        (["Bearer \udcff\u00e9\u2603\x00"], "not known"),
        (["Bearer " + "x" * 1_000_000], "not known"),
        (["Bearer " + sha256_of("ci")], "not known"),
    ],
)
def test_header_when_odd_is_unauthorized_with_the_reason(
    tmp_path: Path, headers: list[str], reason: str
) -> None:
    write_tokens(tmp_path / "tokens.json", ci="submit")
    with pytest.raises(Unauthorized, match=reason):
        opened(tokens_file=tmp_path / "tokens.json").identify(headers)


def test_token_when_it_expires_is_unauthorized_and_says_when(tmp_path: Path) -> None:
    path, clock = tmp_path / "tokens.json", MovedClock()
    end = (datetime.now(UTC) + timedelta(hours=1)).replace(microsecond=0)
    token = {"name": "ci", "scopes": ["submit"], "sha256": sha256_of("ci"), "expires_at": end.isoformat()}
    path.write_text(json.dumps({"tokens": [token]}))
    keyring = Keyring.open(token=OWN, token_file=None, tokens_file=path, is_development=False, clock=clock)
    assert keyring.identify(["Bearer ci"]).name == "ci"
    clock.moved = timedelta(hours=2)
    with pytest.raises(Unauthorized) as refused:
        keyring.identify(["Bearer ci"])
    assert str(refused.value) == f"the token 'ci' expired at {end.isoformat()}"


@pytest.mark.parametrize("is_replaced", [True, False], ids=["renamed over", "written in place"])
@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_tokens_when_the_file_changes_follow_it(tmp_path: Path, is_replaced: bool, age_s: float) -> None:
    path = tmp_path / "tokens.json"

    def write(**scopes: str) -> None:
        target = tmp_path / "new" if is_replaced else path
        write_tokens(target, **scopes)
        # As young as the clock of a file system can tell, or long there.
        moment = datetime.now(UTC).timestamp() - age_s
        os.utime(target, (moment, moment))
        target.replace(path)

    write(a="submit")
    keyring = opened(tokens_file=path)
    assert knows(keyring, "a")
    # The same length, so that in place only the time tells them apart.
    write(b="submit")
    assert (knows(keyring, "a"), knows(keyring, "b")) == (False, True)
    write(b="operate", a="submit")
    assert knows(keyring, "a")
    assert keyring.identify(["Bearer b"]).scopes == (Scope.OPERATE,)


def test_tokens_when_two_edits_share_a_tick_of_the_clock_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, a="submit")
    stamp = path.stat()
    keyring = opened(tokens_file=path)
    write_tokens(path, b="submit")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (knows(keyring, "a"), knows(keyring, "b")) == (False, True)


def test_tokens_when_an_edit_is_broken_stay_and_are_complained_about_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, ci="submit")
    keyring = opened(tokens_file=path)
    with capture_logs() as lines:
        path.write_text('{"tokens": [{"name": "eve", "scopes": ["all"]}]}')
        for _ in range(3):
            assert (knows(keyring, "ci"), knows(keyring, "eve")) == (True, False)
        path.unlink()
        assert knows(keyring, "ci")
        write_tokens(path, eve="submit")
        assert (knows(keyring, "ci"), knows(keyring, "eve")) == (False, True)
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("auth.file_refused", "error"),
        ("auth.file_refused", "error"),
        ("auth.file_read", "info"),
    ]
    assert lines[0]["error"].startswith(f"{path}: tokens[0] ('eve'): scopes.0: ")
    assert lines[1]["error"] == f"{path}: No such file or directory"


def test_file_when_huge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(" " * 2_000_000)
    with pytest.raises(ValueError, match=r"PRACTICUM_TOKENS_FILE: .*tokens.json: holds over 1048576 bytes"):
        opened(tokens_file=path)


def test_own_secret_when_replaced_line_by_line_is_always_accepted(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(OWN + "\n")
    one, other = opened(token_file=path), opened(token_file=path)
    for content, shown in (
        (f"{OWN}\n{NEXT}\n", OWN),
        (f"\n{NEXT}\r\n  {OWN}\n\n", NEXT),
        (NEXT, NEXT),
    ):
        # Between two lines of this loop either of them may have read the file already.
        before = one.shown()
        path.write_text(content)
        assert knows(other, before)
        assert one.shown() == shown
        assert knows(other, one.shown())
    assert not knows(other, OWN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (f"{OWN}\nshort\n", "line 2 has under 24 characters"),
        (f"{OWN} # old\n", "line 1 may hold printable ASCII without spaces only"),
        ('{\n  "tokens": []\n}\n', "line 1 has under 24 characters"),
        (b"\xff" * 30, "is no UTF-8"),
    ],
)
def test_own_secret_when_the_file_will_not_do_names_the_line_and_shows_nothing(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"PRACTICUM_TOKEN_FILE: {path}: {message}") as refused:
        opened(token_file=path)
    assert OWN not in str(refused.value)


def test_own_secret_when_an_edit_is_broken_stays(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(OWN)
    keyring = opened(token_file=path)
    with capture_logs() as lines:
        path.write_text(f"{NEXT}\n{OWN} # the old one\n")
        assert keyring.shown() == OWN
        assert (knows(keyring, OWN), knows(keyring, NEXT)) == (True, False)
    assert [line["event"] for line in lines] == ["auth.file_refused"]
    assert OWN not in str(lines)
    assert NEXT not in str(lines)


def test_keyring_when_shown_hides_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(OWN)
    for keyring in (Keyring.of(OWN), opened(token_file=path), opened()):
        shown = f"{keyring!r} {keyring} {vars(keyring)!r} {keyring._secret()!r}"
        assert OWN not in shown
        assert sha256_of(OWN) not in shown
