"""What a worker of a cluster tells the driver: letters, a post that keeps them, and only what is new in each."""

from __future__ import annotations

from dataclasses import dataclass

from engram.engine.learner import TrialOutcome
from engram.engine.stacks import Key, Outcomes
from engram.engine.unit import Told


@dataclass(frozen=True)
class Letter:
    """What a worker says of its unit. Of outcomes it has what is new since its last letter."""

    number: int  # of the unit
    attempt: int  # how many workers have died of it before
    told: Told
    since: dict[Key, tuple[int, int]]  # rows and records of each trial that letters before this one had


class Post:
    """Where workers leave word for the driver, and learn whether they are to stop."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.stopping = False

    def bring(self, letter: Letter) -> None:
        self.letters.append(letter)

    def take(self) -> list[Letter]:
        letters, self.letters = self.letters, []
        return letters

    def stop(self) -> None:
        self.stopping = True

    def is_stopping(self) -> bool:
        return self.stopping


def with_news(known: Outcomes, letter: Letter) -> Outcomes:
    """Outcomes with what has come to them, in place. Where a letter was lost they stay as they are, until the end."""
    for key, new in letter.told.outcomes.items():
        old = known.setdefault(key, TrialOutcome())
        if letter.since.get(key, (0, 0)) != (len(old.rows), len(old.records)):
            continue
        old.untrained, old.diverged = new.untrained, new.diverged
        old.rows += new.rows
        old.records += new.records
    return known


class News:
    """What is new of outcomes since the last letter: after a hundred tasks, a letter is no longer than after one."""

    def __init__(self) -> None:
        self.sent: dict[Key, tuple[int, int]] = {}  # rows and records

    def of(self, outcomes: Outcomes) -> Outcomes:
        news: Outcomes = {}
        before, self.sent = self.sent, {}
        for key, outcome in outcomes.items():
            rows, records = before.get(key, (0, 0))
            news[key] = TrialOutcome(
                outcome.untrained, outcome.rows[rows:], outcome.records[records:], outcome.diverged
            )
            self.sent[key] = len(outcome.rows), len(outcome.records)
        return news
