"""vLLM's KvHints envelope: which action becomes which hint."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.programs.identify import identify, read_hints
from continuum_connector.programs.kv_hints import MAX_ACTIONS, NO_ACTIONS, read_actions
from continuum_connector.programs.program import Hints


def action(kind: Any, payload: Any = None, name: Any = "a1") -> SimpleNamespace:
    return SimpleNamespace(action_id=name, action_type=kind, action_version="1", payload=payload)


def envelope(*actions: Any) -> SimpleNamespace:
    return SimpleNamespace(protocol_version="1", message_id="m", actions=list(actions))


ENVELOPES = [
    ("pin", envelope(action("pin", {"ttl_s": 5})), Hints(ttl_s=5.0, actions=(("a1", "ttl_s"),))),
    ("retain", envelope(action("retain", {"ttl_s": 60})),
     Hints(keep_s=60.0, actions=(("a1", "keep_s"),))),
    ("unknown", envelope(action("teleport", {})), Hints(actions=(("a1", ""),))),
    ("no payload", envelope(action("pin")), Hints(actions=(("a1", ""),))),
    ("no number", envelope(action("pin", {"ttl_s": "5"})), Hints(actions=(("a1", ""),))),
    ("flag", envelope(action("pin", {"ttl_s": True})), Hints(actions=(("a1", ""),))),
    ("infinite", envelope(action("pin", {"ttl_s": math.inf})), Hints(actions=(("a1", ""),))),
    ("kind of no type", envelope(action(["pin"], {"ttl_s": 5})), Hints(actions=(("a1", ""),))),
    ("several", envelope(action("pin", {"ttl_s": 5}), action("pin", {"ttl_s": 9}, "a2")),
     Hints(ttl_s=5.0, actions=(("a1", "ttl_s"), ("a2", "ttl_s")))),
    ("no actions", envelope(), Hints()),
    ("none", None, Hints()),
    ("junk", SimpleNamespace(actions=7), Hints()),
    ("junk in it", envelope(7), Hints(actions=(("", ""),))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "hints"), [e[1:] for e in ENVELOPES], ids=[e[0] for e in ENVELOPES]
)
def test_actions_become_hints(sent: Any, hints: Hints) -> None:
    assert read_hints(None, None, read_actions(sent)) == hints
    identity = identify(None, {"job_id": "j"}, None, read_actions(sent))
    assert identity is not None
    assert identity.hints == hints


def test_what_the_client_wrote_into_its_params_counts_first() -> None:
    actions = read_actions(envelope(action("pin", {"ttl_s": 5})))
    assert read_hints({"continuum": {"ttl_s": 1}}, None, actions).ttl_s == 1.0


def test_actions_are_bounded() -> None:
    many = read_actions(envelope(*(action("pin", {"ttl_s": 1}, "n" * 999) for _ in range(10_000))))
    assert len(many.became) == MAX_ACTIONS
    assert all(len(name) == 64 for name, _ in many.became)
    assert read_actions(envelope()) is NO_ACTIONS


def test_programs_of_another_salt_are_other_programs() -> None:
    def keys(salt: str | None) -> tuple[str, str | None]:
        said = {"continuum": {"program": "p", "parent": "q"}}
        identity = identify(said, None, None, NO_ACTIONS, salt)
        assert identity is not None
        return identity.key, identity.hints.parent

    assert keys(None) == keys("") == ("p", "q")
    one, other = keys("secret"), keys("\ud800 other")
    assert len({one, other, keys(None)}) == 3
    assert one[0].startswith("salted:")
    assert one[1] == one[0].removesuffix(":p") + ":q"
    assert "secret" not in one[0]
