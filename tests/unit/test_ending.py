"""ToolReader: an aborted turn ended by a stop string, or its client went away."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.toolcalls import STOP_TOKENS, ToolReader


class Words:
    """A tokenizer with one word per token."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded = len(token_ids)
        return " ".join(self.words[i] for i in token_ids)


def aborted(num_outputs: int, stop: Any) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(stop=stop),
        num_output_tokens=num_outputs,
        output_token_ids=list(range(num_outputs)),
    )


def reader_of(load: Callable[[], Any]) -> ToolReader:
    return ToolReader(load, lambda: 0.0, lambda _: None)


def loaded(tokenizer: Any) -> ToolReader:
    reader = reader_of(lambda: tokenizer)
    reader.arrived(aborted(0, ["x"]))
    reader.join()
    return reader


def test_without_stop_strings_an_aborted_turns_client_is_gone() -> None:
    reader = loaded(Words(["a"]))
    for stop in (None, [], ()):
        assert reader.went_away(aborted(1, stop))
    pooling = aborted(0, None)
    pooling.sampling_params = None
    assert reader.went_away(pooling)


@pytest.mark.parametrize("stop", ["Observation:", ["END", "Observation:"]])
def test_the_text_tells_a_stop_string_from_a_disconnect(stop: Any) -> None:
    reader = loaded(Words(["I", "think", "Observation:"]))
    assert not reader.went_away(aborted(3, stop))
    assert reader.went_away(aborted(2, stop))


def test_a_stop_string_over_several_tokens_with_some_after_it_is_found() -> None:
    """With async scheduling a few tokens come after it."""
    reader = loaded(Words(["a", "Obser", "vation:", "x", "y"]))
    assert not reader.went_away(aborted(5, ["Obser vation:"]))


def test_only_the_tail_is_decoded() -> None:
    words = Words(["word"] * 10_000)
    assert loaded(words).went_away(aborted(10_000, ["END"]))
    assert words.num_decoded == STOP_TOKENS


def test_a_turn_without_output_never_ended() -> None:
    assert loaded(Words([])).went_away(aborted(0, ["END"]))


def test_without_a_tokenizer_a_turn_with_stop_strings_counts_as_ended() -> None:
    assert not loaded(None).went_away(aborted(3, ["END"]))


def test_the_tokenizer_is_loaded_once_and_only_if_a_turn_has_stop_strings() -> None:
    num_loads = 0

    def load() -> None:
        nonlocal num_loads
        num_loads += 1

    reader = reader_of(load)
    reader.arrived(aborted(0, None))
    assert (num_loads, reader._thread) == (0, None)
    for _ in range(3):
        reader.arrived(aborted(0, ["x"]))
        reader.join()
    assert num_loads == 1


def test_without_a_loadable_tokenizer_a_turn_with_stop_strings_counts_as_ended() -> None:
    def load() -> None:
        raise OSError("no such file")

    reader = reader_of(load)
    reader.arrived(aborted(0, ["x"]))
    reader.join()
    assert not reader.went_away(aborted(3, ["x"]))
