"""How many proposals to verify: what one more costs against what it brings, measured during the call."""

import statistics
from collections import defaultdict, deque

from transformers import GenerationConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Drafted rounds, each row of a batch counted, before a verdict: at first, and after a pause.
_TRIES_BEFORE_SWITCHING_OFF = 5
_TRIES_AFTER_A_PAUSE = 2
_FIRST_PAUSE = 8
_MAX_PAUSE = 256
# The first slot's acceptance starts as this many of ... tries; each later slot starts from the one before it, which
# counts as _NEIGHBOUR_TRIES. Old rounds count less.
_PRIOR_ACCEPTED, _PRIOR_TRIES = 1.2, 2.0
_NEIGHBOUR_TRIES = 4.0
_FADE = 0.97
_TIMES_KEPT = 9  # of each length
# What the first times are fitted to: one more proposal costs 3% of a round, drafting 15% of a plain one.
_PRIOR_SLOPE, _PRIOR_DRAFT = 0.03, 0.15
_PLAIN_WEIGHT = 2.0
_OUTLIER = 2.0
# Above this many tokens a round, plain decoding cannot win and is not timed.
_CLEARLY_WORTH = 2.5
# Plain rounds are timed when so many rounds have been drafted.
_PLAIN_ROUNDS_AT = (1, 6)


class VerifyLength:
    """Picks the number of proposals for each round of one call, 0 while drafting does not pay.

    It maximises expected tokens per second: (1 + p1 + p1 p2 + ...) over the time of a round, with the acceptance p of
    each slot and a straight line through the times of earlier rounds. No pick looks at tokens that it is for, so
    sampling stays exact.

    Args:
        max_proposals (`int`): Proposals of a whole block.
        fixed (`int`, *optional*): Always this number; nothing is measured.
    """

    def __init__(self, max_proposals: int, fixed: int | None = None):
        self.max_proposals = max_proposals
        self.fixed = fixed
        self._accepted = [0.0] * max_proposals
        self._tries = [0.0] * max_proposals
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_TIMES_KEPT))
        self._num_drafted = 0
        # Seconds of a drafted round without proposals, and the share of it that each proposal adds.
        self._base, self._slope = 0.0, _PRIOR_SLOPE
        self._is_rescaling = False
        self._pause = _FIRST_PAUSE
        self._num_paused_rounds_left = 0
        self._num_tries_left = _TRIES_BEFORE_SWITCHING_OFF
        self._has_reported = False

    def pick(self) -> int:
        """Proposals to verify in the next round."""
        if self.fixed is not None:
            return self.fixed
        if self._num_paused_rounds_left > 0:
            return 0
        if self._num_drafted == 0:
            return self.max_proposals
        tokens = self._expected_tokens()
        rates = [tokens[length] / (1 + self._slope * length) for length in range(self.max_proposals + 1)]
        best = max(range(1, self.max_proposals + 1), key=rates.__getitem__)
        if tokens[best] < _CLEARLY_WORTH:
            if len(self._seconds[0]) < sum(self._num_drafted >= rounds for rounds in _PLAIN_ROUNDS_AT):
                return 0
            is_slower = self._base > rates[best] * self._plain_seconds()
            if self._num_tries_left <= 0 and is_slower:
                self._switch_off(tokens[best], self._base / self._plain_seconds() * (1 + self._slope * best))
                return 0
        timed = [length for length, times in self._seconds.items() if length and times]
        if timed == [best] and best > 2:
            return 3 * best // 4  # one length says nothing about the slope
        return best

    def record(self, num_proposals: int, num_accepted: list[int], seconds: float) -> None:
        """Takes in a round: its proposals, those of them that each row accepted, and its wall time."""
        if self.fixed is not None:
            return
        # The first draft reads the whole prompt, too, so its time says nothing.
        if num_proposals == 0 or self._num_drafted > 0:
            self._add_time(num_proposals, seconds)
        if num_proposals == 0:
            if self._num_paused_rounds_left > 0:
                self._num_paused_rounds_left -= 1
                if self._num_paused_rounds_left == 0:
                    self._try_again()
            return
        self._num_drafted += 1
        self._num_tries_left -= len(num_accepted)
        for slot in range(num_proposals):
            self._accepted[slot] *= _FADE
            self._tries[slot] *= _FADE
        for accepted in num_accepted:
            for slot in range(min(accepted + 1, num_proposals)):
                self._tries[slot] += 1
                self._accepted[slot] += slot < accepted

    def rows_have_left(self) -> None:
        """To be called when rounds become cheaper because rows of the batch have ended; their ratios are kept."""
        self._is_rescaling = True

    def _expected_tokens(self) -> list[float]:
        """Tokens of a round with 0, 1, ... proposals."""
        tokens, reached = [1.0], 1.0
        chance, tries = _PRIOR_ACCEPTED / _PRIOR_TRIES, _PRIOR_TRIES
        for slot in range(self.max_proposals):
            chance = (self._accepted[slot] + tries * chance) / (self._tries[slot] + tries)
            tries = _NEIGHBOUR_TRIES
            reached *= chance
            tokens.append(tokens[-1] + reached)
        return tokens

    def _plain_seconds(self) -> float:
        # Outliers are slow, so of two times the lower one.
        return statistics.median_low(self._seconds[0]) if self._seconds[0] else 0.0

    def _add_time(self, num_proposals: int, seconds: float) -> None:
        expected = self._base * (1 + self._slope * num_proposals) if num_proposals else self._plain_seconds()
        if self._is_rescaling and expected:
            self._is_rescaling = False
            factor = min(seconds / expected, 1.0)
            for length, times in self._seconds.items():
                self._seconds[length] = deque((factor * older for older in times), maxlen=_TIMES_KEPT)
        self._seconds[num_proposals].append(seconds)
        self._fit_line()

    def _fit_line(self) -> None:
        """Least squares without outliers, with weak knowledge of the slope from before and from plain rounds."""
        timed = [(length, seconds) for length, times in self._seconds.items() if length for seconds in times]
        if not timed:
            return
        usual = statistics.median(seconds / (1 + self._slope * length) for length, seconds in timed)
        timed = [(n, seconds) for n, seconds in timed if seconds <= _OUTLIER * usual * (1 + self._slope * n)]
        mean_length = sum(length for length, _ in timed) / len(timed)
        mean_seconds = sum(seconds for _, seconds in timed) / len(timed)
        spread = (self.max_proposals / 3) ** 2
        slope = spread * mean_seconds * _PRIOR_SLOPE / (1 + _PRIOR_SLOPE * mean_length)
        plain = self._plain_seconds()
        if plain:
            slope += _PLAIN_WEIGHT * mean_length * (mean_seconds - (1 + _PRIOR_DRAFT) * plain)
            spread += _PLAIN_WEIGHT * mean_length**2
        for length, seconds in timed:
            slope += (length - mean_length) * (seconds - mean_seconds)
            spread += (length - mean_length) ** 2
        base = mean_seconds - max(slope / spread, 0.0) * mean_length
        # A round with a draft is no faster than one without.
        self._base = max(base, min(plain, mean_seconds), 0.05 * mean_seconds)
        self._slope = max(mean_seconds / self._base - 1, 0.0) / mean_length

    def _switch_off(self, tokens: float, cost: float) -> None:
        self._num_paused_rounds_left = self._pause
        if not self._has_reported:
            self._has_reported = True
            logger.info(
                f"The drafter pauses for {self._pause} tokens: {tokens:.2f} expected tokens a round do not pay for "
                f"{cost:.2f} times the time."
            )
        self._pause = min(2 * self._pause, _MAX_PAUSE)

    def _try_again(self) -> None:
        # One more try is enough for a drafter that was never right.
        self._num_tries_left = _TRIES_AFTER_A_PAUSE if any(self._accepted) else 1
        # The text may have changed, so what was seen before counts half.
        self._accepted = [0.5 * accepted for accepted in self._accepted]
        self._tries = [0.5 * tries for tries in self._tries]


def fixed_proposals(generation_config: GenerationConfig, block_size: int) -> int | None:
    """`num_assistant_tokens` of the call, None where it has Transformers' own default.

    Raises:
        ValueError: If more proposals are asked for than the drafter was trained for.
    """
    asked = generation_config.num_assistant_tokens
    # generate() fills in its own default for assistant models.
    if asked is None or asked == GenerationConfig._get_default_generation_params().get("num_assistant_tokens"):
        return None
    if not 1 <= asked <= block_size - 1:
        raise ValueError(
            f"`num_assistant_tokens` is {asked}, but this drafter proposes 1 to {block_size - 1} tokens "
            f"(`block_size` {block_size} counts the anchor). It cannot draft longer blocks than it was trained for."
        )
    return asked
