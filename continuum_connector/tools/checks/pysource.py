"""Pysource: a program in Python that starts servers -> a script of the shell that starts the same.

Modal's and BentoML's servers stand in one, those of notebooks and launchers too. It is not run: a
name stands for the text, the number or the list that it was given last, and what else a word may
be only the program knows.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
import warnings

_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_PLACE = re.compile(r"\{[^{}]*\}|%[sdr]")  # of str.format and of %


def as_script(text: str) -> tuple[str, bool]:
    """The script, "" if the text is no Python; and whether it can be nothing else."""
    script = _Script()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(textwrap.dedent(text))
        script.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", False
    lines = [*script.lines, *script.uses.values()]
    return "\n".join(lines), any(isinstance(each, _DEFINES) for each in tree.body)


class _Script(ast.NodeVisitor):
    """`lines`: commands in the order of the program; `uses`: of each name, what runs its value."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.uses: dict[str, str] = {}

    def visit(self, node: ast.AST) -> None:
        if _is_text(node) or _is_list(node):
            self.lines.append(_words(node) if _is_list(node) else f"eval {_word(node)}")
        else:
            super().visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # else it explains the program
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets[0], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign(node.target, node.value, "+")

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(ast.Attribute(target, "append"), [_]):
                self._assign(target, ast.List(node.args), "+")
            case ast.Call(ast.Attribute(target, "extend"), [value]):
                self._assign(target, value, "+")
            case _:
                self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr, adds: str = "") -> None:
        name = target.id if isinstance(target, ast.Name) else ""
        is_list = _is_list(value) or bool(adds and "[@]" in self.uses.get(name, ""))
        if not name or not (is_list or _is_text(value)):
            self.visit(value)
        if not adds and name in self.uses:  # another's, of the same name
            self.lines.append(self.uses.pop(name))
        if name:
            said = f"({_words(value)})" if is_list else _word(value)
            self.lines.append(f"{name}{adds}={said}")
            self.uses.setdefault(name, f'"${{{name}[@]}}"' if is_list else f'eval "${{{name}}}"')


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.Constant() | ast.JoinedStr() | ast.BinOp():
            return True
        case ast.Call(ast.Attribute(ast.Constant(), "format")):
            return True
    return False


def _is_list(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_list(node.left) or _is_list(node.right)
    return isinstance(node, ast.List | ast.Tuple)


def _words(node: ast.AST) -> str:
    """The words of a list, one after another."""
    match node:
        case ast.List(parts) | ast.Tuple(parts):
            return " ".join(map(_word, parts))
        case ast.BinOp(left, ast.Add(), right):
            return f"{_words(left)} {_words(right)}"
        case ast.Name(name):
            return f'"${{{name}[@]}}"'
    return _word(node)


def _word(node: ast.AST) -> str:
    """The shell's word for an expression."""
    match node:
        case ast.Constant(value):
            return shlex.quote(str(value))
        case ast.Name(name):
            return f'"${{{name}}}"'
        case ast.Starred(one):
            return _words(one)
        case ast.JoinedStr(parts):
            return "".join(map(_word, parts)) or "''"
        case ast.FormattedValue(one) | ast.Call(ast.Name("str"), [one]):
            return _word(one)
        case ast.BinOp(left, ast.Add(), right):
            return _word(left) + _word(right)
        case ast.BinOp(ast.Constant(str(text)), ast.Mod()) | ast.Call(
            ast.Attribute(ast.Constant(str(text)), "format")
        ):
            return shlex.quote(_PLACE.sub(lambda one: f"${{ {one[0].strip('{}')}}}", text))
    written = re.sub(r"[^\w .,()\[\]+*/=-]", "", ast.unparse(node))
    return f'"${{ {written}}}"'
