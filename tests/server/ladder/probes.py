"""The rungs: each plays one thing that happens to agents' conversations, from an empty cache.

A probe fails by an assertion where it would prove nothing, as nothing was pinned or loaded;
whether its answers are right is for the control to say. Boundaries are those of vLLM's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.server.helpers import eventually, in_flight, pins_live, reset, tokens_of
from tests.server.ladder.player import GONE_S, Asked, Player, Talk

Probe = Callable[[Player], None]
PROBES: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    PROBES[function.__name__] = function
    return function


def hits(asked: Asked, tier: str, least: int = 1) -> Asked:
    found = {"vram": asked.vram, "dram": asked.dram}
    assert found[tier] >= least, f"{least} tokens of {tier} were to be hit, not {found}"
    return asked


def whole(p: Player, num_tokens: int) -> int:
    """Tokens of blocks that a turn which ended with so many leaves: the last token has no KV."""
    return (num_tokens - 1) // p.family.block * p.family.block


# --- turns that go on -----------------------------------------------------------------------
@probe
def goes_on(p: Player, between: Callable[[], None] = lambda: None) -> None:
    talk = p.talk("a")
    talk.turn()
    for _ in range(2):
        left = whole(p, len(talk.tokens))
        between()
        hits(talk.tool().turn(), "vram", left)


@probe
def pinned(p: Player) -> None:
    goes_on(p, between=p.others)


@probe
def loaded(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    for _ in range(2):
        left = whole(p, len(talk.tokens))
        hits(talk.tool().leave(), "dram", left)


@probe
def pinned_then_loaded(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    p.others()
    hits(talk.tool().leave(), "vram")
    hits(talk.tool().turn(), "dram")
    p.others()
    hits(talk.tool().turn(), "vram")


@probe
def long_answer(p: Player) -> None:
    talk = p.talk("a")
    talk.turn(3 * p.family.block + 7)
    p.others()
    hits(talk.tool().turn(2 * p.family.block), "vram", whole(p, 620 + 3 * p.family.block + 7))


@probe
def long_answer_loaded(p: Player) -> None:
    talk = p.talk("a")
    talk.leave(3 * p.family.block + 7)
    hits(talk.tool().leave(2 * p.family.block), "dram", whole(p, 620 + 3 * p.family.block + 7))
    hits(talk.tool().turn(), "dram")


@probe
def answer_of_one_token(p: Player) -> None:
    talk = p.talk("a")
    for _ in range(3):
        talk.leave(1)
        talk.tool(p.family.block // 2)
    hits(talk.turn(1), "dram")


# --- boundaries -----------------------------------------------------------------------------
def _prompt_at(p: Player, num_tokens: int) -> None:
    """Turns of a prompt of so many tokens: pinned, loaded, and asked again as it was."""
    kept, left = p.talk("kept", num_tokens), p.talk("left", num_tokens)
    first = kept.fork("first again")
    kept.turn(8)
    left.leave(8)
    kept.tool(p.family.block).turn(8)
    left.tool(p.family.block).turn(8)
    first.turn(8)


for _name, _blocks, _more in (
    ("one_token", 0, 1),
    ("shorter_than_a_block", 0, 20),
    ("a_block_less_one", 1, -1),
    ("a_block", 1, 0),
    ("a_block_and_one", 1, 1),
    ("blocks_less_one", 6, -1),
    ("blocks", 6, 0),
    ("blocks_and_one", 6, 1),
):

    def _at(p: Player, blocks: int = _blocks, more: int = _more) -> None:
        _prompt_at(p, blocks * p.family.block + more)

    PROBES[f"prompt_of_{_name}"] = _at


@probe
def turn_ends_at_a_boundary(p: Player) -> None:
    """Prompt and answer fill blocks; then with a token more, whose KV the next turn computes."""
    for name, more in (("full", 0), ("one more", 1)):
        talk = p.talk(name, 6 * p.family.block)
        talk.leave(p.family.block + more)
        hits(talk.tool().turn(), "dram", whole(p, 7 * p.family.block + more))


@probe
def asked_again(p: Player) -> None:
    """The same prompt, of which a token is always computed. States and windows of its last block's
    beginning are not kept, so such models hit nothing."""
    talk = p.talk("a", 6 * p.family.block)
    again = [talk.fork() for _ in range(2)]
    talk.leave()
    again[0].leave()
    hits(again[1].turn(), "dram", 0 if p.family.num_groups > 1 else 1)


# --- forks, compactions, edits --------------------------------------------------------------
@probe
def fork(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    other = talk.fork("b")
    p.others()
    hits(talk.tool().turn(), "vram")
    hits(other.tool(70).turn(), "vram")


@probe
def fork_at_once(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    p.others()
    forks = [talk.fork(name).tool(40 + 10 * i) for i, name in enumerate("abc")]
    for asked in p.at_once([each.turn for each in forks]):
        hits(asked, "vram")


@probe
def fork_from_dram_at_once(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    forks = [talk.fork(name).tool(40 + 10 * i) for i, name in enumerate("abc")]
    answers = p.at_once([each.turn for each in forks])
    assert any(asked.dram for asked in answers), "nobody loaded"


@probe
def fork_of_an_old_turn(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    old = talk.fork("old")
    talk.tool(2 * p.family.block).leave()
    talk.tool(2 * p.family.block).leave()
    hits(old.tool(50).turn(), "dram")
    talk.tool().turn()


def _rewritten(p: Player, leave: bool, keep: int, drop: int) -> None:
    talk = p.talk("a", 900)
    turn = talk.leave if leave else talk.turn
    turn()
    talk.tool()
    turn()
    talk.tokens = talk.tokens[:keep] + tokens_of(30, "summary") + talk.tokens[keep + drop :]
    turn()
    talk.tool().turn()


@probe
def compaction(p: Player) -> None:
    _rewritten(p, False, 4 * p.family.block + 5, 300)


@probe
def compaction_from_dram(p: Player) -> None:
    _rewritten(p, True, 4 * p.family.block + 5, 300)


@probe
def compaction_at_a_boundary(p: Player) -> None:
    _rewritten(p, True, 5 * p.family.block, 2 * p.family.block)


@probe
def edit_of_the_last_message(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    before = talk.fork()
    p.others()
    talk.tool(100).turn()
    before.tokens = before.tokens + tokens_of(100, "edited")
    hits(before.turn(), "vram")
    before.tool().turn()


@probe
def edit_of_the_last_message_from_dram(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    before = talk.fork()
    talk.tool(100).leave()
    before.tokens = before.tokens + tokens_of(100, "edited")
    hits(before.leave(), "dram")
    hits(before.tool().turn(), "dram")


@probe
def edit_of_one_token(p: Player) -> None:
    """In the midst of a block that was kept, and in its last token."""
    talk = p.talk("a", 8 * p.family.block)
    talk.leave()
    for place in (5 * p.family.block + 3, 6 * p.family.block - 1):
        edited = talk.fork("edited")
        edited.tokens[place] ^= 1
        edited.turn()
    hits(talk.tool().turn(), "dram")


# --- pressure -------------------------------------------------------------------------------
@probe
def preemption(p: Player) -> None:
    before = p.server.metric("vllm:num_preemptions_total")
    num = 10
    talks = [p.talk(f"{i}", 300 + 7 * i) for i in range(num)]
    p.at_once([partial(each.turn, max(512, 4 * p.family.block)) for each in talks])
    assert p.server.metric("vllm:num_preemptions_total") > before, "nobody was preempted"
    p.at_once([partial(each.tool().turn, 8) for each in talks[:6]])


@probe
def dram_is_full(p: Player) -> None:
    """More programs than DRAM has room for, turn about."""
    talks = [p.talk(f"{i}") for i in range(9)]
    for _ in range(2):
        for talk in talks:
            talk.turn(8, ttl_s=GONE_S)
            talk.tool()
    assert p.server.metric("continuum:dram_evicted_blocks_total"), "nothing left DRAM"
    p.others(num_pins=0)
    last = [talk.turn(8) for talk in talks[-3:]]
    assert any(asked.dram for asked in last), "nothing was left in DRAM"


@probe
def everybody_at_once(p: Player) -> None:
    talks = [p.talk(f"{i}", 400 + 50 * i) for i in range(6)]

    def play(talk: Talk) -> None:
        for i in range(3):
            talk.turn(20, ttl_s=GONE_S if i % 2 else None)
            talk.tool()

    p.at_once([partial(play, each) for each in talks])


@probe
def partly_in_vram(p: Player) -> None:
    """The system prompt is pinned by another program, the rest of the turn is in DRAM."""
    talk = p.talk("a", 900)
    head = Talk(p, "head", talk.tokens[: 5 * p.family.block + 3])
    talk.leave()
    head.turn()
    p.others()
    asked = talk.tool().turn()
    assert asked.dram > 0, "nothing was loaded"


# --- loads that fail ------------------------------------------------------------------------
@probe
def failed_load(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    p.fault("fail")
    talk.tool().leave()
    assert p.happened(), "no load failed"
    talk.tool().turn()


@probe
def failed_load_partly_in_vram(p: Player) -> None:
    talk = p.talk("a", 900)
    head = Talk(p, "head", talk.tokens[: 5 * p.family.block + 3])
    talk.leave()
    head.turn()
    p.others()
    p.fault("fail")
    talk.tool().leave()
    assert p.happened(), "no load failed"
    talk.tool().turn()


@probe
def failed_load_of_forks(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    forks = [talk.fork(name).tool(40 + 10 * i) for i, name in enumerate("abc")]
    p.fault("fail")
    p.at_once([each.turn for each in forks])
    assert p.happened(), "no load failed"


def corrupt(p: Player, group: int) -> list[Asked]:
    """A byte of the newest block of this group is wrong in DRAM; the answer of who loads it."""
    talk = p.talk("a")
    talk.leave()
    p.fault(f"flip {group}")
    talk.tool()
    asked = [talk.turn(32)]
    assert p.happened(), f"no block of group {group} was loaded"
    return asked


@probe
def corrupt_dram(p: Player) -> None:
    for group in range(p.family.num_groups):
        reset(p.server)
        corrupt(p, group)


# --- what clients and operators do ----------------------------------------------------------
@probe
def reset_between_turns(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    reset(p.server)
    asked = talk.tool().turn()
    assert not asked.vram + asked.dram, "a reset forgets"
    hits(talk.tool().turn(), "vram")


@probe
def off_and_on(p: Player) -> None:
    talk = p.talk("a")
    talk.turn()
    p.switch("off")
    talk.tool().turn()
    p.switch("on")
    talk.tool().leave()
    hits(talk.tool().turn(), "dram")


@probe
def abort_then_again(p: Player) -> None:
    talk = p.talk("a")
    for num_chunks in (p.family.block + 5, 3, 0):
        p.abandon(talk.tokens, 4 * p.family.block, num_chunks, talk.name)
    talk.turn()
    p.others()
    hits(talk.tool().turn(), "vram")


@probe
def abort_amid_a_load(p: Player) -> None:
    talk = p.talk("a")
    talk.leave()
    talk.tool()
    for num_chunks in (0, 2, 0):
        p.abandon(talk.tokens, 40, num_chunks, talk.name)
        p.others()
    talk.turn()


@probe
def two_choices(p: Player) -> None:
    talk = p.talk("a")
    # vLLM refuses two greedy ones, and of the CPU build a seed ends the engine.
    both: dict[str, Any] = {"n": 2, "temperature": 1e-3}
    talk.turn(**both)
    p.others()
    again = talk.tool().turn(**both)
    assert again.vram or again.dram, "its pin may have given way to the other choice"


@probe
def stop_token(p: Player) -> None:
    """The answer ends early, by a token it is known to have."""
    talk = p.talk("a")
    ids = talk.fork("other").turn(60, ttl_s=GONE_S).choices[0]
    talk.leave(60, stop_token_ids=[ids[40]])
    hits(talk.tool().turn(), "dram")


@probe
def two_programs_of_one_prefix(p: Player) -> None:
    system = tokens_of(6 * p.family.block + 9, "system")
    one, two = Talk(p, "one", [*system]).tool(), Talk(p, "two", [*system]).tool(60)
    one.turn()
    p.others()
    two.leave()
    one.tool().leave()
    hits(two.tool().turn(), "dram")
    one.tool().turn()


@probe
def tenants(p: Player) -> None:
    """The same tokens with two salts: neither hits what the other left."""
    talk = p.talk("a")
    other = talk.fork()
    talk.leave(cache_salt="one")
    asked = other.turn(cache_salt="two")
    assert not asked.vram + asked.dram, "a tenant hit another one's blocks"
    hits(talk.tool().turn(cache_salt="one"), "dram")


@probe
def final_then_back(p: Player) -> None:
    talk = p.talk("a")
    talk.turn(continuum={"final": True})
    talk.tool().turn()
    p.others()
    hits(talk.tool().turn(), "vram")


@probe
def expired_alone(p: Player) -> None:
    """The pin ends while the engine is idle, and nobody takes the blocks."""
    talk = p.talk("a")
    talk.turn(ttl_s=GONE_S)
    eventually(lambda: not in_flight(p.server) and not pins_live(p.server))
    hits(talk.tool().turn(), "vram")


@probe
def prompt_logprobs(p: Player) -> None:
    """vLLM does not read its cache for these, and fills it all the same."""
    talk = p.talk("a")
    talk.leave(prompt_logprobs=0)
    talk.tool().leave(prompt_logprobs=0)
    hits(talk.tool().turn(), "dram")


@probe
def longest_context(p: Player) -> None:
    talk = p.talk("a", 1900)
    talk.leave()
    talk.tokens = talk.tokens + tokens_of(2048 - 10 - len(talk.tokens), "to the end")
    hits(talk.turn(10), "dram")
