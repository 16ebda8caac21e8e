"""Signs that a run learns less than it could: responses cut at the limit, equal rewards, a filter that keeps nothing.

signals = Signals(config)
signals.add(cut=0.8, without_signal=0.75)       # the shares of a step
for line in signals.warnings(): ...             # each once, when they are high on average: with the setting to change
control.filter = signals.counted(judge, say)    # judge(group), and a line when it has replaced all for some steps
"""

from collections import deque
from collections.abc import Callable, Iterator

from staleflow.config import Config
from staleflow.servers.lifecycle import Group

RECENT = 5
"""Steps over which shares are averaged; groups for as many are replaced in a row before anybody is warned."""
MOST_CUT, MOST_WITHOUT = 0.5, 0.7


class Signals:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._cut: deque[float] = deque(maxlen=RECENT)
        self._without: deque[float] = deque(maxlen=RECENT)
        self._warned: set[str] = set()
        self._replaced = 0
        """Groups in a row."""

    def add(self, cut: float | None, without_signal: float) -> None:
        if cut is not None:
            self._cut.append(cut)
        self._without.append(without_signal)

    @property
    def cut(self) -> float | None:
        """Of the latest step, as ``without_signal``."""
        return self._cut[-1] if self._cut else None

    @property
    def without_signal(self) -> float | None:
        return self._without[-1] if self._without else None

    def warnings(self) -> Iterator[str]:
        rollout, filtered = self._config.rollout, self._config.filter != "none"
        if (share := self._high("cut", self._cut, MOST_CUT)) is not None:
            limit = f"rollout.max_tokens={rollout.max_tokens}"
            yield f"{share:.0%} of responses are cut at {limit}: give more, or ask for shorter ones"
        if (share := self._high("without signal", self._without, MOST_WITHOUT)) is not None:
            fix = "give" if filtered else "filter=no-signal replaces them; or give"
            yield (
                f"{share:.0%} of groups have equal rewards and teach nothing: {fix} problems that are neither too easy "
                "nor too hard, or a larger group_size"
            )

    def counted(
        self, judge: Callable[[Group], str | None], say: Callable[[str], None]
    ) -> Callable[[Group], str | None]:
        """The same filter, which says so when no step will come of it."""
        most = RECENT * self._config.groups

        def judged(group: Group) -> str | None:
            why = judge(group)
            self._replaced = 0 if why is None else self._replaced + 1
            if self._replaced == most:
                say(
                    f"filter={self._config.filter} has replaced the last {most} groups, all of them ({why}): no step "
                    "is made until it keeps some; look at the rewards, or set filter=none"
                )
            return why

        return judged

    def _high(self, name: str, shares: deque[float], most: float) -> float | None:
        """Their average, if it is too high and nobody was warned."""
        mean = sum(shares) / RECENT
        if len(shares) < RECENT or mean <= most or name in self._warned:
            return None
        self._warned.add(name)
        return mean
