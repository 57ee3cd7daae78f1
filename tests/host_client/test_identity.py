"""Names in the cluster follow from the user, and no two users share one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_client.errors import UsageError
from host_client.identity import (
    MAX_NAME,
    default_user,
    home_claim,
    is_sandbox_id,
    named_sandbox_id,
    new_sandbox_id,
    user_key,
)

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
NASTY = [
    "alice", "Alice", "alice ", "ａlice", "alice/../bob", "../bob", "*", "?", "bo*",
    "${aws:username}", "a" * 256, "alice--x", "-x-", ".", "..", "ALICE", "ali\u0301ce", "alíce",
    "user@example.com", "user-example-com", "root@host", "a" * 41,
]  # fmt: skip


def test_a_plain_label_keeps_its_name() -> None:
    assert user_key("alice") == "alice"
    assert home_claim(user_key("alice")) == "user-alice-pvc"


def test_distinct_ids_have_distinct_valid_keys() -> None:
    keys = [user_key(user) for user in NASTY]
    assert len(set(keys)) == len(NASTY)
    assert all(LABEL.fullmatch(key) and len(key) <= 43 for key in keys)


def test_a_user_cannot_name_himself_after_anothers_hash() -> None:
    victim = user_key("bob@example.com")
    assert user_key(victim) != victim


@pytest.mark.parametrize("bad", ["", "a\0b", "a\nb", "x" * 300, "a\x7f", "\udcff"])
def test_an_unusable_id_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="user id"):
        user_key(bad)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60))
def test_every_other_id_has_a_label_as_key(user: str) -> None:
    assert LABEL.fullmatch(user_key(user))


def test_the_default_user_names_the_machine() -> None:
    assert "@" in default_user()


def test_sandbox_ids_are_random_labels_that_start_with_a_letter() -> None:
    ids = {new_sandbox_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(LABEL.fullmatch(i) and i[0].isalpha() and is_sandbox_id(i) for i in ids)


def test_a_name_gives_the_same_id_for_its_user_only() -> None:
    assert named_sandbox_id("alice", "work") == named_sandbox_id("alice", "work")
    assert named_sandbox_id("alice", "work") != named_sandbox_id("bob", "work")
    assert named_sandbox_id("alice", "work").startswith("work-")


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "Work",
        "9lives",
        "a_b",
        "-a",
        "a-",
        "ü",
        "a" * (MAX_NAME + 1),
        "a" * 60,
        "a" * 63,
        "a" * 64,
        "a" * 253,
        "ａ",
        "а",
        "a.b",
        "a\u200b",
        "a b",
        "a/b",
        "a\n",
    ],
)
def test_an_unusable_name_is_refused_with_an_example(bad: str) -> None:
    """L43: a long name made a pod that never came."""
    with pytest.raises(UsageError, match="build-1"):
        named_sandbox_id("alice", bad)


@given(st.text(max_size=80))
def test_only_what_may_enter_an_argv_passes_as_an_id(text: str) -> None:
    if is_sandbox_id(text):
        assert re.fullmatch(r"[a-z][a-z0-9-]*", text)


def test_the_longest_name_still_makes_valid_object_names() -> None:
    sandbox_id = named_sandbox_id("alice", "a" * MAX_NAME)
    assert is_sandbox_id(sandbox_id)
    assert len(f"sandbox-{sandbox_id}-01234-99999") <= 63
