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
    r"|\((?P<k8s>[A-Z_][A-Z0-9_]*)\))"
)
_OTHER = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$[@*#?]|\$\{[^}]*\}")
# what stands for itself, taken at once: a word may have a megabyte
_PLAIN = re.compile(r"""[^\s;&|()<>\\'"$`^\0]+""")
_PLAIN_QUOTED = re.compile(r'[^"\\$`\0]+')
# <your key>, as guides write it: no redirection, which has a space or a file's end behind it
_PLACE = re.compile(r"<[A-Za-z](?:[\w .-]*\w)?>(?=[\s'\"/:,)]|$)")
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)  # $'...'
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_REDIRECTS = re.compile(r"[<>]+&?-?")
_GAP = re.compile(r"#[^\n]*|\s+")
_END = ("\n", ";", "&", "|", "(", ")")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_CONTINUED = ("\\\n", "^\n", "`\n")  # the last two in cmd.exe and in PowerShell


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
    skips = False  # the next word names a file of a redirection
    at, end = 0, len(text)
    while at <= end:
        char = text[at] if at < end else "\n"
        if text[at : at + 2] in _CONTINUED:
            at += 2
            continue
        if char == "(" and word is not None and word[-1:] == "=" and ASSIGNMENT.match(word):
            piece, at = _array(text, at + 1, script)
            word += SPLIT + piece
            continue
        if char in " \t\r\n;&|()<>" and not _PLACE.match(text, at):
            if char in "<>" and word is not None and word.isdecimal():
                word = None  # 2>file
            if word is not None and not skips:
                words += _fields(word)
            skips = skips and word is None
            word = None
            if char in "<>":
                at = _REDIRECTS.match(text, at).end()  # type: ignore[union-attr]
                skips = True
                continue
            if char == "&" and text[at + 1 : at + 2] == ">":  # &>file
                at += 1
                continue
            if char in _END and words:
                yield words
                words, skips = [], False
            at += 1
            continue
        if char == "#" and word is None:
            at = text.find("\n", at) % (end + 1)  # -1: at the end
            continue
        piece, at = _piece(text, at, script)
        word = "" if word is None else word
        word += piece  # alone on its line, it copies nothing
    if words:
        yield words


def _fields(word: str) -> list[str]:
    """The words that a word becomes: what is assigned stays one, but for an array."""
    if SPLIT not in word or f"={SPLIT}" in word:
        return [word]
    if ASSIGNMENT.match(word):
        return [word.replace(SPLIT, " ")]
    return [each for each in word.split(SPLIT) if each]


def _array(text: str, at: int, script: Script) -> tuple[str, int]:
    """The words of `NAME=(...)`, and where it ends."""
    found = ""
    while text[at : at + 1] not in (")", ""):
        if match := _GAP.match(text, at):
            piece, at = SPLIT, match.end()
        else:
            piece, at = _piece(text, at, script)
        found += piece
    return found, at + 1


def _piece(text: str, at: int, script: Script) -> tuple[str, int]:
    """A part of a word that is quoted, or stands for something; and where it ends."""
    char = text[at]
    if mark := _MARK.match(text, at):  # of a variable that a text within the text holds
        return mark[0], mark.end()
    if char == "\\":
        return text[at + 1 : at + 2], at + 2
    if char == "'":
        if (end := text.find("'", at + 1)) < 0:
            raise ValueError("a quotation is not closed")
        return text[at + 1 : end], end + 1
    if char == '"':
        return _quoted(text, at, script)
    if match := _PLACE.match(text, at):
        return _mark(match[0], None), match.end()
    if match := _ANSI.match(text, at):
        said = re.sub(r"(?s)\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), match[1])
        return said, match.end()
    if char in "$`":
        piece, at = _expanded(text, at, script)
        return _BLANK.sub(lambda found: found[1] or SPLIT, piece), at
    if plain := _PLAIN.match(text, at):
        return plain[0], plain.end()
    return char, at + 1


def _quoted(text: str, at: int, script: Script) -> tuple[str, int]:
    found, at = "", at + 1
    while text[at : at + 1] != '"':
        if at >= len(text):
            raise ValueError("a quotation is not closed")
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            found += text[at + 1].replace("\n", "")
            at += 2
        elif mark := _MARK.match(text, at):
            found, at = found + mark[0], mark.end()
        elif text[at] in "$`":
            piece, at = _expanded(text, at, script)
            found += piece
        elif plain := _PLAIN_QUOTED.match(text, at):
            found, at = found + plain[0], plain.end()
        else:
            found, at = found + text[at], at + 1
    return found, at + 1


def _expanded(text: str, at: int, script: Script) -> tuple[str, int]:
    if match := _VARIABLE.match(text, at):
        name = match["name"] or match["braced"] or match["k8s"]
        if name in script.known:
            return script.known[name], match.end()
        rest = match["rest"] or ""
        default = rest[2:] if rest[:2] in (":-", ":=") else rest[1:] if rest[:1] == "-" else None
        is_unknown = default and ("$" in default or OPEN in default)
        return _mark(match[0], None if is_unknown else default), match.end()
    if match := _OTHER.match(text, at):
        return _mark(match[0], None), match.end()
    return text[at], at + 1


def _mark(written: str, default: str | None) -> str:
    written = _MARK.sub(r"\1", written)[:MAX_SHOWN]
    return f"{OPEN}{written}\1" + ("" if default is None else f"\3{default}") + "\2"


def expanded(word: str, known: Mapping[str, str]) -> str:
    """A word without quotes, with what is known filled in, and marks for the rest."""
    script, found, at = Script(known=dict(known)), "", 0
    while at < len(word):
        piece, at = _expanded(word, at, script) if word[at] == "$" else (word[at], at + 1)
        found += piece
    return found


def filled(word: str) -> tuple[str | None, list[str]]:
    """The word with defaults in the place of its marks, None if one has none; what stood there."""
    marks = list(_MARK.finditer(word))
    names = [match[1] for match in marks]
    if not all(match[2] for match in marks):
        return None, names
    return _MARK.sub(lambda match: match[3], word), names
