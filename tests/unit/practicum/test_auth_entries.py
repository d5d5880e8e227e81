"""The tokens file: what is refused and how it is said, and a search that tells nothing by its time."""

import json
from typing import Any

import pytest

from practicum.auth.entries import TokenEntry, dump_entries, find_entry, new_secret, parse_entries, sha256_of
from practicum.auth.scopes import Scope

SECRET = "practicum_a-secret-that-was-pasted-in-the-wrong-place"


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "ci", "scopes": ["submit"], "sha256": sha256_of("a"), **changes}


def file_of(*entries: Any) -> bytes:
    return json.dumps({"tokens": entries}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[]", 'one field, "tokens"'),
        (b'{"tokens": {}}', 'one field, "tokens"'),
        (b'{"tokens": [], "token": []}', 'one field, "tokens"'),
        (file_of("ci"), r"tokens\[0\]: "),
        (
            file_of(entry(), entry(name="b", expires="2027-01-01T00:00:00Z")),
            r"tokens\[1\] \('b'\): expires: ",
        ),
        (file_of(entry(scopes=[])), r"tokens\[0\] \('ci'\): scopes: "),
        (
            file_of(entry(scopes=["root"])),
            r"tokens\[0\] \('ci'\): scopes.0: .*'submit', 'operate' or 'internal'",
        ),
        (file_of(entry(scopes=["submit", "submit"])), "scopes: one is named twice"),
        (file_of(entry(sha256=SECRET)), r"tokens\[0\] \('ci'\): sha256: "),
        (file_of(entry(sha256=sha256_of("a").upper())), "sha256: "),
        (file_of(entry(sha256=sha256_of("a") + "\n")), "sha256: "),
        (file_of(entry(name="two words")), r"tokens\[0\] \('two words'\): name: "),
        (file_of(entry(name="a\nb")), "name: "),
        (file_of(entry(name="services")), "name: 'services' means"),
        (file_of(entry(expires_at="2027-01-01T00:00:00")), "expires_at: .*timezone"),
        (file_of(entry(expires_at="soon")), "expires_at: "),
        (file_of({"name": "ci", "scopes": ["submit"]}), "sha256: Field required"),
        (file_of(entry(), entry()), r"tokens\[1\]: name: the same as that of tokens\[0\]"),
        (file_of(entry(), entry(name="b")), r"tokens\[1\]: sha256: the same as that of tokens\[0\]"),
    ],
)
def test_file_when_something_is_wrong_is_refused_and_names_the_entry(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_entries(content)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_file_when_written_and_read_is_the_same() -> None:
    entries = parse_entries(
        file_of(entry(expires_at="2027-01-31T12:00:00+02:00"), entry(name="b", sha256=sha256_of("b")))
    )
    assert entries[0].expires_at is not None
    assert entries[0].expires_at.isoformat() == "2027-01-31T12:00:00+02:00"
    assert parse_entries(dump_entries(entries)) == entries
    assert parse_entries(dump_entries([])) == ()


def test_entry_when_shown_hides_its_hash() -> None:
    made = TokenEntry(name="ci", scopes=(Scope.SUBMIT,), sha256=sha256_of("a"))
    assert sha256_of("a") not in f"{made!r} {made}"


@pytest.mark.parametrize("shown", ["first", "second", "third", "nobody's", ""])
def test_search_when_an_entry_matches_compares_all_of_them_by_hash(shown: str) -> None:
    entries = [
        TokenEntry(name=name, scopes=(Scope.SUBMIT,), sha256=sha256_of(name))
        for name in ("first", "second", "third")
    ]
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return left == right

    found = find_entry(sha256_of(shown), entries, compare)
    assert (found.name if found else None) == (shown if shown in ("first", "second", "third") else None)
    assert compared == [(entry.sha256, sha256_of(shown)) for entry in entries]


def test_secret_when_made_is_new_and_long() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    # 32 bytes are 43 characters of base64.
    assert all(secret.startswith("practicum_") and len(secret) == len("practicum_") + 43 for secret in made)


@pytest.mark.parametrize("held", list(Scope))
def test_scope_when_it_stands_higher_includes_those_before(held: Scope) -> None:
    included = {
        Scope.SUBMIT: "submit",
        Scope.OPERATE: "submit operate",
        Scope.INTERNAL: "submit operate internal",
    }
    assert [str(scope) for scope in Scope if held.includes(scope)] == included[held].split()
