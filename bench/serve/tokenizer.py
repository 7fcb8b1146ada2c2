"""The tiny models' tokenizer: made here, nothing downloaded, any text in and out.

A made-up word with its leading space is one token; everything else falls back to bytes. A
sequence of word tokens therefore reads back as the same tokens, so an answer that a client
sends again as history meets the prefix cache where the engine left it. (With an ordinary
byte-level vocabulary a random model answers broken UTF-8, and every next turn would miss.)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

SPECIALS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD, BOS, EOS = 0, 1, 2
NUM_BYTES = 256
FIRST_WORD = len(SPECIALS) + NUM_BYTES

# No strip, no default system prompt: history must be a prefix of what comes later.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% elif m['content'] %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def words(vocab_size: int) -> list[str]:
    """The made-up words, in id order: token FIRST_WORD + i is " " + words(...)[i]."""
    syllables = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    made = (itertools.product(syllables, repeat=length) for length in (2, 3))
    joined = map("".join, itertools.chain.from_iterable(made))
    return list(itertools.islice(joined, vocab_size - FIRST_WORD))


def write_tokenizer(folder: Path, vocab_size: int, max_position: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIALS, *alphabet, *("\u0120" + word for word in words(vocab_size))]
    if len(pieces) != vocab_size:
        raise ValueError(f"vocab_size = {vocab_size} cannot be filled; the most is {len(pieces)}")
    # Without merges a piece is either found whole (ignore_merges) or spelled in bytes.
    bpe = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def text(rng: random.Random, vocabulary: Sequence[str], num_words: int) -> str:
    """Made-up words, each one token."""
    return "".join(" " + word for word in rng.choices(vocabulary, k=num_words))
