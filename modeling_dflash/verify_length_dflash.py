"""How many proposals to verify: what one more costs against what it brings, measured during the call."""

from transformers import GenerationConfig
from transformers.utils import logging

from .round_times_dflash import RoundTimes

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
# Above this many tokens a round, plain decoding cannot win and is not timed.
_CLEARLY_WORTH = 2.5
# Plain rounds are timed when so many rounds have been drafted.
_PLAIN_ROUNDS_AT = (1, 6)


class DraftPauses:
    """Whether the next round is drafted: not where plain rounds give more tokens a second.

    After some rounds that did not pay, drafting pauses; each pause is twice as long as the one before.
    """

    def __init__(self):
        self._num_drafted = 0
        self._length = _FIRST_PAUSE
        self._num_rounds_left = 0
        self._num_tries_left = _TRIES_BEFORE_SWITCHING_OFF
        self._has_reported = False

    @property
    def is_pausing(self) -> bool:
        """Whether a pause lasts on."""
        return self._num_rounds_left > 0

    def skips_draft(self, times: RoundTimes, num_tokens: float, cost: float) -> bool:
        """Whether the next round should be a plain one, to be timed or as the first of a pause.

        Args:
            num_tokens (`float`): Tokens of each row that a drafted round is expected to give.
            cost (`float`): Its time in units of `times.base`.
        """
        if num_tokens >= _CLEARLY_WORTH:
            return False
        if times.num_plain < sum(self._num_drafted >= rounds for rounds in _PLAIN_ROUNDS_AT):
            return True
        is_slower = times.base * cost > num_tokens * times.plain_seconds()
        if self._num_tries_left > 0 or not is_slower:
            return False
        self._start(num_tokens, times.base * cost / times.plain_seconds())
        return True

    def add_drafted(self, num_rows: int) -> None:
        """Counts a round that was drafted."""
        self._num_drafted += 1
        self._num_tries_left -= num_rows

    def add_plain(self, was_ever_right: bool) -> bool:
        """Counts a round without a draft, and says whether a pause ended with it."""
        if not self.is_pausing:
            return False
        self._num_rounds_left -= 1
        if self.is_pausing:
            return False
        # One more try is enough for a drafter that was never right.
        self._num_tries_left = _TRIES_AFTER_A_PAUSE if was_ever_right else 1
        return True

    def _start(self, num_tokens: float, cost: float) -> None:
        self._num_rounds_left = self._length
        if not self._has_reported:
            self._has_reported = True
            logger.info(
                f"The drafter pauses for {self._length} tokens: {num_tokens:.2f} expected tokens a round do not pay "
                f"for {cost:.2f} times the time."
            )
        self._length = min(2 * self._length, _MAX_PAUSE)


class VerifyLength:
    """Picks the number of proposals for each round of one call, 0 while drafting does not pay.

    It maximises expected tokens per second: (1 + p1 + p1 p2 + ...) over the time of a round, with the acceptance p of
    each slot and the curve of [`RoundTimes`]. No pick looks at tokens that it is for, so sampling stays exact.

    Args:
        max_proposals (`int`): Proposals of a whole block.
        fixed (`int`, *optional*): Always this number; nothing is measured.
        only_whole (`bool`): Shorter chains cost as much as whole blocks, so there is nothing to shorten.
    """

    def __init__(
        self,
        max_proposals: int,
        fixed: int | None = None,
        *,
        only_whole: bool = False,
    ):
        self.max_proposals = max_proposals
        self.min_proposals = max_proposals if only_whole else 1
        self.fixed = fixed
        self.times = RoundTimes(max_proposals)
        self._accepted = [0.0] * max_proposals
        self._tries = [0.0] * max_proposals
        self._num_drafted = 0
        self._pauses = DraftPauses()

    def pick(self) -> int:
        """Proposals to verify in the next round."""
        if self.fixed is not None:
            return self.fixed
        if self._pauses.is_pausing:
            return 0
        if self._num_drafted == 0:
            return self.max_proposals
        tokens = self._expected_tokens()
        costs = [self.times.relative(length) for length in range(self.max_proposals + 1)]
        best = max(
            range(self.min_proposals, self.max_proposals + 1), key=lambda length: tokens[length] / costs[length]
        )
        if self._pauses.skips_draft(self.times, tokens[best], costs[best]):
            return 0
        if self.times.drafted_sizes == [best] and best > max(2, self.min_proposals):
            return 3 * best // 4  # one length says nothing about the slope
        return best

    def record(self, num_proposals: int, num_accepted: list[int], seconds: float | None) -> None:
        """Takes in a round: its proposals, those of them that each row accepted, and its wall time, if it counts."""
        if self.fixed is not None:
            return
        # The first draft reads the whole prompt, too, so its time says nothing.
        if seconds is not None and (num_proposals == 0 or self._num_drafted > 0):
            self.times.add(num_proposals, seconds)
        if num_proposals == 0:
            if self._pauses.add_plain(any(self._accepted)):
                # The text may have changed, so what was seen before counts half.
                self._accepted = [0.5 * accepted for accepted in self._accepted]
                self._tries = [0.5 * tries for tries in self._tries]
            return
        self._num_drafted += 1
        self._pauses.add_drafted(len(num_accepted))
        for slot in range(num_proposals):
            self._accepted[slot] *= _FADE
            self._tries[slot] *= _FADE
        for accepted in num_accepted:
            for slot in range(min(accepted + 1, num_proposals)):
                self._tries[slot] += 1
                self._accepted[slot] += slot < accepted

    def rows_have_left(self) -> None:
        """To be called when rounds become cheaper because rows of the batch have ended; ratios of times are kept."""
        self.times.rescale()

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
