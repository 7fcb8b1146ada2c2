"""Which program a request names, from every place that may name one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum_connector.programs.identify import (
    MAX_ID_CHARS,
    MAX_TOOL_CHARS,
    MAX_TOOLS,
    as_flag,
    as_id,
    identify,
    read_hints,
)
from continuum_connector.programs.program import (
    MAX_KEY_CHARS,
    Hints,
    Identity,
    IdentitySource,
    anonymous_key,
    program_key,
)

CONTINUUM, CLIENT = IdentitySource.CONTINUUM, IdentitySource.CLIENT
SESSION, VENDOR = IdentitySource.SESSION, IdentitySource.VENDOR


def continuum(**fields: Any) -> dict[str, Any]:
    return {"continuum": fields}


SOURCES = [
    ("continuum", continuum(program="a"), None, None, "a", CONTINUUM),
    ("agent hint", {"agent_hint": {"trajectory_id": "a"}}, None, None, "hint:a", CONTINUUM),
    ("agent hint session", {"agent_hint": {"session_id": "a"}}, None, None, "hint:a", CONTINUUM),
    ("xargs job_id", None, {"job_id": "a"}, None, "job:a", CLIENT),
    ("xargs program_id", None, {"program_id": "a"}, None, "job:a", CLIENT),
    ("number", None, {"job_id": 7}, None, "job:7", CLIENT),
    ("number zero", None, {"job_id": 0}, None, "job:0", CLIENT),
    ("xargs session_id", None, {"session_id": "a"}, None, "session:a", SESSION),
    ("session_id", None, None, "a", "session:a", SESSION),
    ("job_id by middleware", continuum(program="a", source="job_id"), None, None, "job:a", CLIENT),
    (
        "session by middleware",
        continuum(program="a", source="session_id"),
        None,
        None,
        "session:a",
        SESSION,
    ),
    (
        "vendor by middleware",
        continuum(program="codex:a", source="vendor"),
        None,
        None,
        "codex:a",
        VENDOR,
    ),
    ("unknown mark", continuum(program="a", source="lineage"), None, None, "a", CONTINUUM),
    ("mark of no type", continuum(program="a", source=["vendor"]), None, None, "a", CONTINUUM),
    ("spaces", None, {"job_id": "  a\n"}, None, "job:a", CLIENT),
    ("not Latin", None, None, "заяц 兔", "session:заяц 兔", SESSION),
]


@pytest.mark.parametrize(
    ("params", "xargs", "session", "key", "source"),
    [s[1:] for s in SOURCES],
    ids=[s[0] for s in SOURCES],
)
def test_each_source_names_its_program(
    params: Any, xargs: Any, session: Any, key: str, source: IdentitySource
) -> None:
    assert identify(params, xargs, session) == Identity(key, source)


def test_the_strongest_source_wins() -> None:
    ladder = [
        ({"continuum": {"program": "c"}}, {}, None, "c"),
        ({"agent_hint": {"trajectory_id": "t"}}, {}, None, "hint:t"),
        ({}, {"job_id": "j"}, None, "job:j"),
        ({}, {"program_id": "p"}, None, "job:p"),
        ({}, {"session_id": "x"}, None, "session:x"),
        ({}, {}, "s", "session:s"),
    ]
    params: dict[str, Any] = {}
    xargs: dict[str, Any] = {}
    session = None
    for more_params, more_xargs, more_session, key in reversed(ladder):
        params, xargs = params | more_params, xargs | more_xargs
        session = more_session or session
        identity = identify(params, xargs, session)
        assert identity is not None
        assert identity.key == key


def test_a_vendor_mark_yields_to_job_id_and_session() -> None:
    params = continuum(program="codex:v", source="vendor", parent="codex:u")
    assert identify(params, {"job_id": "j"}, "s") == Identity("job:j", CLIENT)
    assert identify(params, None, "s") == Identity("session:s", SESSION)
    assert identify(params, None, None) == Identity("codex:v", VENDOR, Hints(parent="codex:u"))


def test_equal_ids_from_different_places_are_different_programs() -> None:
    keys = [
        identify(continuum(program="x"), None, None),
        identify({"agent_hint": {"trajectory_id": "x"}}, None, None),
        identify(None, {"job_id": "x"}, None),
        identify(None, None, "x"),
    ]
    assert len({identity.key for identity in keys if identity}) == len(keys)


HINTS = [
    ("all", continuum(final=True, ttl_s=3, tools=["a", "b"]), {}, Hints(True, 3.0, ("a", "b"))),
    ("explicit no", continuum(final=False), {}, Hints(final=False)),
    ("xarg 1", {}, {"is_last_step": 1}, Hints(final=True)),
    ("xarg 0", {}, {"is_last_step": 0}, Hints(final=False)),
    ("xarg text", {}, {"is_last_step": "True"}, Hints(final=True)),
    ("xarg junk", {}, {"is_last_step": 2}, Hints()),
    ("xarg None", {}, {"is_last_step": None}, Hints()),
    ("xarg NaN", {}, {"is_last_step": math.nan}, Hints()),
    ("tool", {}, {"this_func_call": "bash"}, Hints(tools=("bash",))),
    ("tools", {}, {"this_func_call": ["bash", "", 3, None, " ls "]}, Hints(tools=("bash", "ls"))),
    ("one tool", continuum(tools="bash"), {}, Hints(tools=("bash",))),
    ("tools junk", continuum(tools={"bash": 1}), {}, Hints(unread=("tools",))),
    ("a day", continuum(ttl_s=1e9), {}, Hints(ttl_s=86400.0)),
    ("huge int", continuum(ttl_s=10**400), {}, Hints(ttl_s=86400.0)),
    ("zero", continuum(ttl_s=0), {}, Hints(ttl_s=0.0)),
    ("negative", continuum(ttl_s=-1), {}, Hints(unread=("ttl_s",))),
    ("NaN", continuum(ttl_s=math.nan), {}, Hints(unread=("ttl_s",))),
    ("infinite", continuum(ttl_s=math.inf), {}, Hints(unread=("ttl_s",))),
    ("text", continuum(ttl_s="3"), {}, Hints(unread=("ttl_s",))),
    ("flag", continuum(ttl_s=True), {}, Hints(unread=("ttl_s",))),
    ("null", continuum(ttl_s=None, final=None), {}, Hints()),
    ("a hint that is gone", continuum(keep_s=300), {}, Hints(unread=("keep_s",))),
    ("compaction", continuum(compaction=True), {}, Hints(compaction=True)),
    ("lower fills in", continuum(ttl_s=1), {"is_last_step": 1}, Hints(final=True, ttl_s=1.0)),
    ("higher wins", continuum(final=False), {"is_last_step": 1}, Hints(final=False)),
    ("resumes", {"agent_hint": {"expected_resume": False}}, {}, Hints(final=True)),
    (
        "lease",
        {"agent_hint": {"lease_until": 1.8e9, "tools_available": ["a"]}},
        {},
        Hints(unread=("lease_until",)),
    ),
]


@pytest.mark.parametrize(
    ("params", "xargs", "hints"), [h[1:] for h in HINTS], ids=[h[0] for h in HINTS]
)
def test_hints_come_with_or_without_a_program(params: Any, xargs: Any, hints: Hints) -> None:
    assert read_hints(params, xargs) == hints
    assert identify(params, xargs, None) is None
    assert identify(params, xargs, "s") == Identity("session:s", SESSION, hints)


PARENTS = [
    ("own", continuum(program="a", parent="b"), {}, "b"),
    ("itself", continuum(program="a", parent="a"), {}, None),
    ("itself, reserved", continuum(program="salted:a", parent=":salted:a"), {}, None),
    ("hint", {"agent_hint": {"session_id": "a", "parent_session_id": "b"}}, {}, "hint:b"),
    ("of a job", continuum(parent="b"), {"job_id": "a"}, "job:b"),
    (
        "of another namespace",
        continuum(program="v:a", source="vendor", parent="v:b"),
        {"job_id": "a"},
        None,
    ),
    ("marked", continuum(program="a", source="session_id", parent="b"), {}, "session:b"),
]


@pytest.mark.parametrize(
    ("params", "xargs", "parent"), [p[1:] for p in PARENTS], ids=[p[0] for p in PARENTS]
)
def test_a_parent_is_read_in_the_namespace_of_its_program(
    params: Any, xargs: Any, parent: str | None
) -> None:
    identity = identify(params, xargs, None)
    assert identity is not None
    assert identity.hints.parent == parent


def test_a_parent_without_a_program_says_nothing() -> None:
    """Its id would be one of a namespace that nobody named (docs/hints.md)."""
    assert identify(continuum(parent="b"), None, None) is None
    assert read_hints(continuum(parent="b"), None) == Hints()


NO_IDS: list[Any] = [
    None, "", "  ", "\t\n", "None", "null", "undefined", True, False, 1.5, math.nan, -1, 2**64,
    10**400, [], ["a"], {}, {"a": 1}, b"a", "x" * 70_000, object(),
]  # fmt: skip


@pytest.mark.parametrize("junk", NO_IDS, ids=lambda value: repr(value)[:12])
def test_what_is_no_id_names_nobody(junk: Any) -> None:
    assert as_id(junk) is None
    assert identify(continuum(program=junk), {"job_id": junk, "session_id": junk}, junk) is None
    assert identify({"continuum": junk, "agent_hint": junk}, junk, junk) is None
    assert identify(junk, junk, junk) is None
    for place in ({"job_id": junk}, {"job_id": junk, "program_id": "b"}):
        identity = identify(continuum(program=junk), place, "s")
        assert identity is not None
        assert identity.key == ("job:b" if "program_id" in place else "session:s")


def test_long_ids_become_a_prefix_and_a_digest() -> None:
    one, other = "x" * 10_000 + "1", "x" * 10_000 + "2"
    keys = {identify(None, {"job_id": name}, None).key for name in (one, other)}  # type: ignore[union-attr]
    assert len(keys) == 2
    assert all(len(key) == MAX_KEY_CHARS and key.startswith("job:xxx") for key in keys)
    assert program_key("x" * MAX_KEY_CHARS, None) == "x" * MAX_KEY_CHARS
    salted = {program_key(name, "salt") for name in (one, other)}
    assert len(salted) == 2
    assert all(len(key) == MAX_KEY_CHARS for key in salted)


def places(text: str) -> list[tuple[Any, Any, Any]]:
    """Every place a client may write a name to: arguments of `identify`."""
    marks = [None, "job_id", "session_id", "vendor", "lineage", "none", ""]
    return [
        *((continuum(program=text, source=mark), None, None) for mark in marks),
        ({"agent_hint": {"trajectory_id": text}}, None, None),
        ({"agent_hint": {"session_id": text}}, None, None),
        *((None, {field: text}, None) for field in ("job_id", "program_id", "session_id")),
        (None, None, text),
    ]


def keys_of(text: str, salt: str | None) -> set[str]:
    """The keys of every program that a client can name, or call its parent, with one text."""
    keys = set()
    for params, xargs, session in places(text):
        found = identify(params, xargs, session, salt=salt)
        keys |= {found.key} if found else set()
    above = identify(continuum(program="child", parent=text), None, None, salt=salt)
    assert above is not None
    return keys | ({above.hints.parent} if above.hints.parent else set())


@pytest.mark.parametrize("salt", [None, "", "theirs"])
@pytest.mark.parametrize("owner", ["anonymous", "salted", "salted job", "salted, long"])
def test_whoever_has_read_a_key_that_is_not_in_his_reach_cannot_write_it(
    owner: str, salt: str | None
) -> None:
    names = {"salted": "run", "salted job": "job:run", "salted, long": "run" * 100}
    key = program_key(names[owner], "ours") if owner in names else anonymous_key()
    middle = key.split(":", 1)[1]
    for text in (key, f" {key}\n", f":{key}", middle, f"{key}\u200b", key.upper()):
        assert key not in keys_of(text, salt)


@settings(max_examples=100)
@given(st.text(), st.sampled_from(["", "anonymous:", "salted:", ":", "\n", "\ud800"]))
def test_no_text_without_a_salt_becomes_a_key_of_the_namespaces_kept_from_clients(
    text: str, start: str
) -> None:
    for name in (start + text, *(f"{space}{start}{text}" for space in ("job:", "codex:"))):
        assert not program_key(name, None).startswith(("anonymous:", "salted:"))


def test_a_name_with_a_salt_is_one_program_and_with_another_salt_another() -> None:
    keys = [identify(None, {"job_id": "a"}, None, salt=salt) for salt in ("x", "x", "y", None)]
    one, again, other, without = (found.key for found in keys if found)
    assert one == again
    assert len({one, other, without}) == 3
    assert without == "job:a"
    assert one.endswith(":job:a")


def test_digests_cannot_be_computed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, salt in (("a", "salt"), ("a" * 300, None)):
        with monkeypatch.context() as patch:
            key = program_key(name, salt)
            patch.setattr("continuum_connector.programs.program._SECRET", b"of another process")
            assert program_key(name, salt) != key


def test_an_anonymous_key_is_no_count() -> None:
    keys = [anonymous_key() for _ in range(100)]
    assert len(set(keys)) == 100
    assert len({key[:20] for key in keys}) == 100


def test_a_salt_too_long_to_hash_in_a_step_leaves_its_request_nameless() -> None:
    longest = "s" * MAX_ID_CHARS
    assert identify(None, {"job_id": "a"}, None, salt=longest) is not None
    assert identify(None, {"job_id": "a"}, None, salt=longest + "s") is None


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "\x00", "a\u202eb"])
def test_keys_are_printable_whatever_the_id(name: str) -> None:
    identity = identify(None, None, name)
    assert identity is not None
    assert identity.key.isprintable()
    assert identity.key.encode()


def test_tools_are_bounded() -> None:
    hints = read_hints(continuum(tools=["t" * 1000] + [f"t{i}" for i in range(100_000)]), None)
    assert len(hints.tools) == MAX_TOOLS
    assert all(len(name) <= MAX_TOOL_CHARS for name in hints.tools)
    assert read_hints(continuum(tools=[None] * 100_000 + ["late"]), None).tools == ()


@pytest.mark.parametrize(
    ("value", "flag"),
    [(True, True), (1, True), (1.0, True), ("on", True), (" YES ", True), (False, False),
     (0, False), ("0", False), ("no", False), (2, None), ("maybe", None), (None, None), ([], None)],
)  # fmt: skip
def test_flags(value: Any, flag: bool | None) -> None:
    assert as_flag(value) is flag


NAMES = st.sampled_from(
    ["continuum", "agent_hint", "program", "parent", "final", "ttl_s", "tools", "source", "job_id",
     "program_id", "is_last_step", "this_func_call", "session_id", "trajectory_id", "compaction"]
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(["vendor", "job_id", "session_id", 10**400])
)  # fmt: skip
FIELDS = st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=2), max_size=4) | SCALARS
PARAMS = st.dictionaries(st.sampled_from(["continuum", "agent_hint"]), FIELDS) | SCALARS


@settings(max_examples=60)
@given(PARAMS, FIELDS, SCALARS)
def test_identify_is_total_and_keys_are_bounded(params: Any, xargs: Any, session: Any) -> None:
    identity = identify(params, xargs, session)
    hints = read_hints(params, xargs) if identity is None else identity.hints
    if identity is not None:
        assert 0 < len(identity.key) <= MAX_KEY_CHARS
        assert identity.key.isprintable()
        assert hints.parent != identity.key
    assert hints.ttl_s is None or 0 <= hints.ttl_s <= 86_400
    assert len(hints.tools) <= MAX_TOOLS
