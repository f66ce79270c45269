"""What a round costs against the proposals that it verifies: a convex curve through measured times."""

import statistics
from collections import defaultdict, deque

_TIMES_KEPT = 9  # of each size
# What the first times are fitted to: one more proposal costs 3% of a round, drafting 15% of a plain one.
_PRIOR_SLOPE, PRIOR_DRAFT = 0.03, 0.15
_PLAIN_WEIGHT = 2.0
_OUTLIER = 2.0
# Where the curve may bend upwards; up to the first it is a straight line.
_KNOTS = (16, 32, 64)
_BEND_PRIOR = 3.0  # times that a steeper slope needs before it counts half
# So many times in a row, all off by this share to the same side, are a change of the machine or of the context.
_DRIFT_TIMES, _DRIFT_SHARE = 4, 0.15


class RoundTimes:
    """Times of rounds by their number of proposals, 0 for a round without a draft, and a curve through them.

    The curve of drafted rounds is `base * relative(n)`: a straight line up to 16 proposals, then pieces that are each
    at least as steep as the one before. So what one more proposal costs never falls.

    Args:
        usual_size (`int`): Proposals of a usual round: how much weight the first guess of the slope gets.
    """

    def __init__(self, usual_size: int):
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_TIMES_KEPT))
        self._prior_spread = (usual_size / 3) ** 2
        # Seconds of a drafted round without proposals, and the share of it that each proposal adds.
        self.base, self.slope = 0.0, _PRIOR_SLOPE
        self._bends: list[float] = []  # slopes behind each knot
        self._is_rescaling = False
        self._errors: deque[float] = deque(maxlen=_DRIFT_TIMES)

    @property
    def num_plain(self) -> int:
        """Rounds without a draft that were timed lately."""
        return len(self._seconds.get(0, ()))

    @property
    def drafted_sizes(self) -> list[int]:
        """Numbers of proposals of which there are times."""
        return [size for size, times in self._seconds.items() if size and times]

    def plain_seconds(self) -> float:
        """Time of a round without a draft; 0.0 if none was timed."""
        # Outliers are slow, so of two times the lower one.
        return statistics.median_low(self._seconds[0]) if self.num_plain else 0.0

    def relative(self, num_proposals: int) -> float:
        """Time of a drafted round in units of `base`."""
        straight = min(num_proposals, _KNOTS[0])
        seconds = 1.0 + self.slope * straight
        for knot, end, slope in zip(_KNOTS, (*_KNOTS[1:], num_proposals), self._slopes_behind_knots(), strict=True):
            if num_proposals > knot:
                seconds += slope * (min(num_proposals, end) - knot)
        return seconds

    def relative_plain(self) -> float:
        """Time of a round without a draft in units of `base`; a guess before one was timed."""
        plain = self.plain_seconds()
        return plain / self.base if plain and self.base else 1.0 / (1.0 + PRIOR_DRAFT)

    def add(self, num_proposals: int, seconds: float) -> None:
        """Takes in the time of a round."""
        if self._is_rescaling:
            expected = self.base * self.relative(num_proposals) if num_proposals else self.plain_seconds()
            if expected:
                self._is_rescaling = False
                self._scale(min(seconds / expected, 1.0))
        elif times := self._seconds.get(num_proposals):
            self._follow_drift(seconds / statistics.median(times))
        self._seconds[num_proposals].append(seconds)
        self._fit_line()
        self._fit_bends()

    def rescale(self) -> None:
        """The next time tells by which factor all rounds have become cheaper; their ratios are kept."""
        self._is_rescaling = True

    def _slopes_behind_knots(self) -> list[float]:
        return self._bends or [self.slope] * len(_KNOTS)

    def _follow_drift(self, error: float) -> None:
        """Scales older times if the machine or the context is no longer what it was."""
        self._errors.append(error)
        is_full = len(self._errors) == _DRIFT_TIMES
        if is_full and (min(self._errors) > 1 + _DRIFT_SHARE or max(self._errors) < 1 - _DRIFT_SHARE):
            self._scale(statistics.median(self._errors))

    def _scale(self, factor: float) -> None:
        self._errors.clear()
        for size, times in self._seconds.items():
            self._seconds[size] = deque((factor * older for older in times), maxlen=_TIMES_KEPT)

    def _fit_line(self) -> None:
        """A line through the times up to the first knot."""
        sizes = self.drafted_sizes
        if not sizes:
            return
        lines = [self._line(sizes)]
        if straight := [size for size in sizes if size <= _KNOTS[0]]:
            lines.append(self._line(straight))
        # If larger rounds say that the slope is lower, the small ones were too few: a convex curve only gets steeper.
        self.base, self.slope = min(lines, key=lambda line: line[1])

    def _line(self, sizes: list[int]) -> tuple[float, float]:
        """Least squares without outliers, with weak knowledge of the slope from before and from plain rounds."""
        timed = [(size, seconds) for size in sizes for seconds in self._seconds[size]]
        usual = statistics.median(seconds / (1 + self.slope * size) for size, seconds in timed)
        timed = [(n, seconds) for n, seconds in timed if seconds <= _OUTLIER * usual * (1 + self.slope * n)]
        mean_size = sum(size for size, _ in timed) / len(timed)
        mean_seconds = sum(seconds for _, seconds in timed) / len(timed)
        spread = self._prior_spread
        slope = spread * mean_seconds * _PRIOR_SLOPE / (1 + _PRIOR_SLOPE * mean_size)
        plain = self.plain_seconds()
        if plain:
            slope += _PLAIN_WEIGHT * mean_size * (mean_seconds - (1 + PRIOR_DRAFT) * plain)
            spread += _PLAIN_WEIGHT * mean_size**2
        for size, seconds in timed:
            slope += (size - mean_size) * (seconds - mean_seconds)
            spread += (size - mean_size) ** 2
        base = mean_seconds - max(slope / spread, 0.0) * mean_size
        # A round with a draft is no faster than one without.
        base = max(base, min(plain, mean_seconds), 0.05 * mean_seconds)
        return base, max(mean_seconds / base - 1, 0.0) / mean_size

    def _fit_bends(self) -> None:
        """Slopes behind the knots: the median of what was seen there, at least as steep as the piece before."""
        self._bends = []
        if not self.base or max(self._seconds) <= _KNOTS[0]:
            return
        slope, height = self.slope, 1.0 + self.slope * _KNOTS[0]
        for knot, end in zip(_KNOTS, (*_KNOTS[1:], float("inf")), strict=True):
            # Right behind a knot a small error of the time would be a large one of the slope.
            seen = [
                (seconds / self.base - height) / (size - knot)
                for size, times in self._seconds.items()
                if knot + knot / 8 <= size <= end
                for seconds in times
            ]
            if seen:
                found = statistics.median_low(seen)
                slope = max(slope, (len(seen) * found + _BEND_PRIOR * slope) / (len(seen) + _BEND_PRIOR))
            self._bends.append(slope)
            height += slope * (end - knot)
