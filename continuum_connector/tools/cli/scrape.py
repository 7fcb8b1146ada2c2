"""Scrape: one answer of /metrics, and what was added since an earlier one. Reads no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from continuum_connector.errors import shown
from continuum_connector.tools.cli.server import CommandError, sample

MAX_LINE = 16 << 10  # characters; its parser takes the square of them, for labels
OF_INTEREST = ("vllm:", "continuum:")

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Samples by name: each one's labels and value. `at`: seconds, of any clock that only grows."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Read the exposition format; CommandError where it is none."""
        samples: dict[str, dict[Labels, float]] = {}
        try:
            if any(len(line) > MAX_LINE for line in text.splitlines()):
                raise ValueError(f"a line is longer than {MAX_LINE:,} characters")
            for family in text_string_to_metric_families(text):
                if family.name.startswith(OF_INTEREST):
                    for each in family.samples:
                        if (value := sample(str(each.value))) is not None:
                            labels = frozenset((key, shown(of)) for key, of in each.labels.items())
                            samples.setdefault(each.name, {})[labels] = value
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # what its parser raises
            raise CommandError(
                f"/metrics answers, but not in Prometheus' format ({error}); check host and port"
            ) from None
        return cls(at, samples)

    def since(self, older: Scrape) -> Scrape:
        """What was added between the two; like Prometheus, a counter that fell began anew."""
        added = {
            name: {labels: _added(value, older._at(name, labels)) for labels, value in each.items()}
            for name, each in self.samples.items()
        }
        return Scrape(self.at - older.at, added)

    def has(self, prefix: str) -> bool:
        """Whether any name begins so."""
        return any(name.startswith(prefix) for name in self.samples)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that carry all of `labels`; 0.0 if there is none."""
        wanted = set(labels.items())
        return sum(v for have, v in self.samples.get(name, {}).items() if wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums per value of one label."""
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            key = dict(have).get(label)
            if key is not None:
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def values(self, name: str, label: str) -> list[str]:
        """The different values of one label, sorted."""
        return sorted({dict(have).get(label, "") for have in self.samples.get(name, {})} - {""})

    def _at(self, name: str, labels: Labels) -> float:
        return self.samples.get(name, {}).get(labels, 0.0)


def _added(value: float, before: float) -> float:
    return value - before if value >= before else value
