"""The document: one HTML file that needs nothing else; no script, no font, no picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from bench.page.palette import Look, css

STYLE = Path(__file__).with_name("page.css")


def document(heading: str, body: Iterable[str]) -> str:
    """The whole file. `heading` is plain text, `body` HTML, a block each."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(heading)}</title>'
        f"<style>\n{css()}{STYLE.read_text()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def facts(told: Mapping[str, str]) -> str:
    """Terms and what is to be said of them, in HTML; what is empty is left out."""
    return f"<dl>{''.join(f'<dt>{k}</dt><dd>{v}</dd>' for k, v in told.items() if v)}</dl>"


def legend(looks: Mapping[str, Look]) -> str:
    """Which arm is drawn how."""
    items = (f"<span>{_stroke(look)}{escape(arm)}</span>" for arm, look in looks.items())
    return f'<div class="arms">{"".join(items)}</div>'


def table(rows: Iterable[str], kind: str = "") -> str:
    """Rows of HTML; on a narrow screen they scroll. `kind`: dense, for many columns."""
    opening = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="wide">{opening}{"".join(rows)}</table></div>'


def failed(heading: str, lines: Iterable[str]) -> str:
    """What went wrong, in HTML, a line each; "" if nothing did."""
    told = "".join(f"<li>{line}</li>" for line in lines)
    return f'<div class="failed"><b>{heading}</b><ul>{told}</ul></div>' if told else ""


def section(heading: str, how: str, drawn: str) -> str:
    """A plot below its name and how to read it."""
    return f'<h3>{heading}</h3>\n<p class="how">{how}</p>\n{drawn}'


def _stroke(look: Look) -> str:
    dash = "" if isinstance(look.line, str) else " ".join(f"{3 * d / 2:g}" for d in look.line[1])
    return (
        f'<svg viewBox="0 0 26 10"><path d="M1 5H25" style="stroke:var({look.variable});'
        f'stroke-width:{1.3 * look.width:g};stroke-dasharray:{dash or "none"}"/></svg>'
    )
