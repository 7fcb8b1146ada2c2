"""Shell: a pasted script -> its commands, each a list of words. Nothing is run.

What only a shell knows (variables, `$(...)`) is filled in where the text itself says it. Where it
does not, a mark stands in the word: `filled` takes marks out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

OPEN = "\0"  # begins a mark: what is written there, and its default, if it has one
MAX_SHOWN = 60  # characters of what is written at a mark
SPLIT = "\4"  # stands where a word of several ends, in what a variable or an array holds
_MARK = re.compile("\0([^\1]*)\1(\3?)([^\2]*)\2")
_BLANK = re.compile("(\0[^\2]*\2)|\\s+|^$")  # ends a word, but not within a mark
# $VAR, ${VAR}, ${VAR:-default}, $(VAR) of Kubernetes; of more than that only the name counts
_VARIABLE = re.compile(
    r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?:\[[@*]\])?(?P<rest>[^}]*)\}"
    r"|\((?P<k8s>[A-Z_][A-Z0-9_]*)\)|\((?:[^()]|\([^()]*\))*\)|[@*#?]|\{[^}]*\})"
)
# Of a variable that a text within the text holds there may be a mark already.
_STANDS = rf"(?P<mark>\x00[^\x02]*\x02)|(?P<filled>{_VARIABLE.pattern}|`[^`]*`)"
# What stands for itself is taken at once, because a word may have a megabyte.
_QUOTED = re.compile(
    rf"""\\(?P<escaped>["\\$`\n]) | (?P<quote>") | {_STANDS} | [^"\\$`\0]+ | .""",
    re.VERBOSE | re.DOTALL,
)
# A place is <your key>, as guides write it: a redirection has a space or a file's end behind it.
# In cmd.exe ^ continues a line, in PowerShell `.
_BARE = re.compile(
    rf"""(?P<skipped>[\\^`]\n(?!\Z))
       | (?P<place><[A-Za-z](?:[\w .-]*\w)?>(?=[\s'"/:,)]|$))
       | (?P<redirect>[<>]+&?-? | &(?=>)) | (?P<blank>[ \t\r]+) | (?P<end>[\n;&|()])
       | '(?P<said>[^']*)' | (?P<open>') | (?P<quote>") | \$'(?P<ansi>(?:[^'\\]|\\.)*)'
       | \\(?P<escaped>.?) | {_STANDS} | [^\s;&|()<>\\'"$`^\0]+ | .""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)


@dataclass
class Script:
    """`commands`: each with the words of one. `known`: variables that the text sets, for more than
    one command; `assigned`: names of all that it ever sets."""

    commands: list[list[str]] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)


def read(text: str, environ: Mapping[str, str] | None = None) -> Script:
    """The commands of a script. `environ`: variables that are known beforehand.

    Raises ValueError if a quotation is not closed.
    """
    script = Script(known=dict(environ or {}))
    for words in _split(text.replace("\r\n", "\n"), script):
        script.commands.append(words)
        _assign(words, script)
    return script


def _assign(words: list[str], script: Script) -> None:
    """What a command leaves for those behind it; what stands before a program is its alone."""
    words = [*dropwhile(("then", "do", "else", "{").__contains__, words)] or [""]
    rest = words[1:] if words[0] in ("export", "declare", "set") else words
    found = [*takewhile(bool, map(ASSIGNMENT.fullmatch, rest))]
    script.assigned.update(match[1] for match in found if match)
    for match in found if rest is not words or len(found) == len(words) else ():
        if match:
            adds = match[0][len(match[1])] == "+"
            script.known[match[1]] = adds * script.known.get(match[1], "") + match[2]
    for word in words[1:] if words[0] == "unset" else ():
        script.known.pop(word, None)


def _split(text: str, script: Script) -> Iterator[list[str]]:
    """One pass over the text. A redirection and what it names are left out."""
    words: list[str] = []
    word: str | None = None
    skips = is_quoted = is_array = False  # skips: the next word names a file of a redirection
    at, text = 0, f"{text}\n"
    while at < len(text):
        if text[at] == "#" and not is_quoted and (word is None or word[-1:] == SPLIT):
            at = text.index("\n", at)
        token = (_QUOTED if is_quoted else _BARE).match(text, at)
        assert token  # as each character is one
        at, kind, piece = token.end(), token.lastgroup or "", token[0]
        if kind == "skipped":
            continue
        if kind == "open":
            break
        if is_array and kind in ("blank", "end", "redirect"):
            is_array = piece != ")"
            word = f"{word}{SPLIT if piece.isspace() else piece * is_array}"
            continue
        if piece == "(" and kind and word and word[-1] == "=" and ASSIGNMENT.match(word):
            is_array, word = True, word + SPLIT
            continue
        if kind in ("blank", "end", "redirect"):
            is_stream = word is not None and word.isdecimal() and piece[0] in "<>"  # 2>file
            if word is not None and not skips and not is_stream:
                words += _fields(word)
            skips = kind == "redirect" or (skips and word is None)
            word = None
            if kind == "end" and words:
                yield words
                words, skips = [], False
            continue
        if kind == "quote":
            is_quoted, piece = not is_quoted, ""
        elif kind in ("said", "escaped"):
            piece = token[kind] if kind == "said" or not is_quoted else token[kind].strip("\n")
        elif kind == "ansi":
            piece = re.sub(r"(?s)\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), token["ansi"])
        elif kind == "place":
            piece = _mark(piece, None)
        elif kind == "filled":
            piece = _filled(token, script.known)
            if not is_quoted:
                piece = _BLANK.sub(lambda found: found[1] or SPLIT, piece)
        word = (word or "") + piece
    if is_quoted or at < len(text):
        raise ValueError("a quotation is not closed")
    if words:
        yield words


def _fields(word: str) -> list[str]:
    """The words that a word becomes: what is assigned stays one, but for an array."""
    if SPLIT not in word or f"={SPLIT}" in word:
        return [word]
    if ASSIGNMENT.match(word):
        return [word.replace(SPLIT, " ")]
    return [each for each in word.split(SPLIT) if each]


def _filled(found: re.Match[str], known: Mapping[str, str]) -> str:
    """What is known of a variable or a command; a mark if nothing is."""
    name = found["name"] or found["braced"] or found["k8s"]
    if name in known:
        return known[name]
    rest = found["rest"] or ""
    default = rest[2:] if rest[:2] in (":-", ":=") else rest[1:] if rest[:1] == "-" else None
    is_unknown = default and ("$" in default or OPEN in default)
    return _mark(found[0], None if is_unknown else default)


def _mark(written: str, default: str | None) -> str:
    written = _MARK.sub(r"\1", written)[:MAX_SHOWN]
    return f"{OPEN}{written}\1" + ("" if default is None else f"\3{default}") + "\2"


def expanded(word: str, known: Mapping[str, str]) -> str:
    """A word without quotes, with what is known filled in, and marks for the rest."""
    return _VARIABLE.sub(lambda found: _filled(found, known), word)


def filled(word: str) -> tuple[str | None, list[str]]:
    """The word with defaults in the place of its marks, None if one has none; what stood there."""
    marks = list(_MARK.finditer(word))
    names = [match[1] for match in marks]
    if not all(match[2] for match in marks):
        return None, names
    return _MARK.sub(lambda match: match[3], word), names
