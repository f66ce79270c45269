"""How many nodes a tree gets: as long as one more node brings more tokens a second than it costs."""

import functools
import itertools
import math
from collections import deque

from .round_times_dflash import RoundTimes
from .tree_growth_dflash import MAX_CANDIDATES, MAX_NODES, Children, GrownPaths, SlotCandidates, grow_paths
from .verify_length_dflash import DraftPauses

# Later slots share what is learned about them.
_NUM_DEPTHS = 4
_LIKELIEST, _OTHER, _ASIDE, _REPEAT = _KINDS = range(4)
_FADE = 0.99
# What is known before the first outcome of a kind of node; an outcome of even odds adds 0.25.
_PRIOR_INFORMATION = 2.0
_LARGEST_LOG_ODDS = 12.0
_RANKS_LEARNED = 4
# The deepest of so many trees tells how many slots the next one may use.
_TREES_REMEMBERED = 4
# A node that is less likely never pays.
_MIN_CHANCE = 0.002
# A round's own best rate counts as this many rounds when there are few others.
_OWN_ROUNDS = 1.0
_RATE_FADE = 0.95
# Tokens of a drafted round before there was one.
_PRIOR_TOKENS, _PRIOR_ROUNDS = 2.0, 1.0
_BENEFIT_OF_DOUBT = 0.4  # tokens, after one round


class ChanceCalibration:
    """What the draft's probabilities are worth: log odds that are added to them, learned from what was accepted.

    There is one number for each depth (the fourth and later ones share theirs) and kind of node: the draft's likeliest
    token on the main path, another token next to it, a token below such another one, and a token that repeats its
    parent's: a draft does not know which token was taken in the slot before. Every outcome moves it by one Newton step
    of logistic regression; old outcomes count less.
    """

    def __init__(self):
        self._shifts = [[0.0] * len(_KINDS) for _ in range(_NUM_DEPTHS)]
        self._information = [[_PRIOR_INFORMATION] * len(_KINDS) for _ in range(_NUM_DEPTHS)]

    def corrected(self, tokens: list[list[int]], slots: list[list[float]]) -> Children:
        """Candidates for [`grow_paths`].

        Args:
            tokens (`list[list[int]]`), slots (`list[list[float]]`): Candidates and their draft probabilities.
        """

        @functools.cache  # few of them are asked for, but often
        def ordered(slot: int, is_below_main: bool, repeat: int | None) -> list[tuple[float, int]]:
            shifts = self._shifts[min(slot, _NUM_DEPTHS - 1)]
            chances = [
                _shifted(chance, shifts[_kind(rank, is_below_main, repeat)]) for rank, chance in enumerate(slots[slot])
            ]
            return sorted(zip(chances, range(len(chances)), strict=True), key=lambda candidate: -candidate[0])

        return lambda slot, is_below_main, parent: ordered(slot, is_below_main, _repeat(tokens, slot, parent))

    def learn(self, tokens: list[list[int]], slots: list[list[float]], choices: list[int]) -> None:
        """Takes in the target's choices at the visited nodes of one row, the last one included.

        Args:
            tokens (`list[list[int]]`), slots (`list[list[float]]`): Candidates and their draft probabilities.
            choices (`list[int]`): One token for each visited depth; there may be one more than there are slots.
        """
        is_main, parent = True, 0
        for slot, (choice, candidates, chances) in enumerate(zip(choices, tokens, slots, strict=False)):
            repeat = _repeat(tokens, slot, parent)
            for rank, (token, chance) in enumerate(zip(candidates[:_RANKS_LEARNED], chances, strict=False)):
                self._step(slot, _kind(rank, is_main, repeat), chance, token == choice)
            if choice not in candidates:
                break
            parent = candidates.index(choice)
            is_main = is_main and parent == 0

    def copy(self) -> "ChanceCalibration":
        """An independent copy."""
        twin = ChanceCalibration()
        twin._shifts = [list(row) for row in self._shifts]
        twin._information = [list(row) for row in self._information]
        return twin

    def _step(self, slot: int, kind: int, chance: float, was_right: bool) -> None:
        depth = min(slot, _NUM_DEPTHS - 1)
        expected = _shifted(chance, self._shifts[depth][kind])
        information = _PRIOR_INFORMATION + _FADE * (self._information[depth][kind] - _PRIOR_INFORMATION)
        information += expected * (1 - expected)
        self._information[depth][kind] = information
        self._shifts[depth][kind] += (was_right - expected) / information


class TreeBudget:
    """Grows the trees of one call, and picks their size and the rounds without one.

    A tree gets nodes in the order of their chances as long as the next one's chance is worth its time at the call's
    rate of tokens: chances fall, and on a convex curve the cost of one more node never does, so there is one such
    point. A tree may turn out a chain. No pick looks at tokens that it is for, so sampling stays exact.

    Args:
        max_depth (`int`): Slots of a block that may be used.
        num_nodes (`int`, *optional*): Always so many nodes beside the anchor, the likeliest ones; nothing is timed.
        calibration ([`ChanceCalibration`], *optional*): What earlier calls have learned.
        sizes (`list[int]`, *optional*): The only numbers of nodes that differ in cost, ascending: trees are filled up
            to the next of them.
    """

    def __init__(
        self,
        max_depth: int,
        num_nodes: int | None = None,
        calibration: ChanceCalibration | None = None,
        *,
        sizes: list[int] | None = None,
    ):
        self.sizes = sizes
        self.max_depth = max_depth
        self.fixed = num_nodes
        self.times = RoundTimes(max_depth)
        self.calibration = calibration or ChanceCalibration()
        self._pauses = DraftPauses()
        self._num_drafted = 0
        # Of drafted rounds, older ones counting less: their number, tokens of each row as found and as expected, times
        # in units of the curve.
        self._rounds = self._tokens = self._expected = self._cost = 0.0
        self._candidates: SlotCandidates | None = None
        self._expected_tokens = 0.0
        self._depths: deque[int] = deque(maxlen=_TREES_REMEMBERED)

    @property
    def max_candidates(self) -> int:
        """Tokens of a slot that may become nodes."""
        return MAX_CANDIDATES if self.fixed is None else min(MAX_CANDIDATES, self.fixed)

    def pick(self) -> int:
        """Slots to draft for the next round, 0 for a round without a draft."""
        if self.fixed is not None or self._num_drafted == 0:
            return self.max_depth
        if self._pauses.is_pausing:
            return 0
        num_tokens = (self._tokens + _PRIOR_TOKENS) / (self._rounds + _PRIOR_ROUNDS)
        # A mean of few rounds may be low by chance, and a pause costs more than a try.
        num_tokens += _BENEFIT_OF_DOUBT / math.sqrt(self._rounds + _PRIOR_ROUNDS)
        if self._pauses.skips_draft(self.times, num_tokens, self._cost / self._rounds):
            return 0
        # Each slot is a row of the head, and trees are seldom deep. If one needs them all, the next has one more.
        return min(self.max_depth, max(self._depths, default=self.max_depth) + 1)

    def grow(
        self, candidates: SlotCandidates, is_over: list[bool], most_nodes: int | None = None
    ) -> tuple[list[GrownPaths], int]:
        """Each row's best paths, and the number of nodes beside the anchor to verify of them.

        Args:
            is_over (`list[bool]`): Rows that need no more tokens.
            most_nodes (`int`, *optional*): There is room for no more.
        """
        num_slots = len(candidates.chances[0])
        rows = [
            self.calibration.corrected(tokens, slots)
            for tokens, slots in zip(candidates.tokens, candidates.chances, strict=True)
        ]
        self._candidates = candidates
        largest, floor = self._bounds()
        grown = [
            grow_paths(children, num_slots, 1 if over else largest, floor)
            for children, over in zip(rows, is_over, strict=True)
        ]
        if self.fixed is None:
            num_nodes = self._worthwhile([paths for paths, over in zip(grown, is_over, strict=True) if not over])
        else:
            num_nodes = max(paths.num_nodes for paths in grown) - 1
        if most_nodes is not None:
            num_nodes = min(most_nodes, num_nodes)
        if self.fixed is not None:
            return grown, num_nodes
        for row, paths in enumerate(grown):
            if paths.num_nodes <= num_nodes and not is_over[row]:  # the other rows pay for its nodes
                grown[row] = grow_paths(rows[row], num_slots, num_nodes)
        self._depths.append(max(max(paths.depths[: num_nodes + 1]) for paths in grown))
        return grown, num_nodes

    def record(self, num_nodes: int, choices: list[list[int]], seconds: float | None) -> None:
        """Takes in a round.

        Args:
            num_nodes (`int`): Nodes beside the anchor.
            choices (`list[list[int]]`): The target's choices at the visited nodes of each row; none if it was over.
            seconds (`float`, *optional*): Its wall time, if it can be compared with that of other rounds.
        """
        candidates, self._candidates = self._candidates, None
        if candidates is not None:
            for tokens, chances, chosen in zip(candidates.tokens, candidates.chances, choices, strict=True):
                self.calibration.learn(tokens, chances, chosen)
        if self.fixed is not None:
            return
        # The first draft reads the whole prompt, too, so its time says nothing.
        if seconds is not None and (num_nodes == 0 or self._num_drafted > 0):
            self.times.add(num_nodes, seconds)
        if candidates is None:
            if num_nodes == 0 and self._pauses.add_plain(was_ever_right=self._tokens > self._rounds):
                self._fade(0.5)  # the text may have changed
            return
        lengths = [len(chosen) for chosen in choices if chosen]
        self._num_drafted += 1
        self._pauses.add_drafted(len(lengths))
        self._fade(_RATE_FADE)
        self._rounds += 1
        self._tokens += sum(lengths) / max(len(lengths), 1)
        self._expected += self._expected_tokens
        self._cost += self.times.relative(num_nodes)

    def rows_have_left(self) -> None:
        """As [`VerifyLength.rows_have_left`]."""
        self.times.rescale()

    def _bounds(self) -> tuple[int, float]:
        """Nodes beside the anchor that a tree may get at most, and the chance below which none pays."""
        if self.fixed is not None:
            return self.fixed, 0.0
        # Twice what was timed at most: the curve is a guess beyond that.
        largest = min(2 * max([self.max_depth, *self.times.drafted_sizes]), MAX_NODES)
        # No rate is below that of plain decoding, and no node is cheaper than the second.
        return largest, max(_MIN_CHANCE, self.times.slope / self.times.relative_plain())

    def _fade(self, share: float) -> None:
        self._rounds, self._tokens = share * self._rounds, share * self._tokens
        self._expected, self._cost = share * self._expected, share * self._cost

    def _worthwhile(self, grown: list[GrownPaths]) -> int:
        """Nodes beside the anchor up to which each one's mean chance pays for its time."""
        longest = max(paths.num_nodes for paths in grown)
        most = longest - 1
        gains = [
            sum(paths.chances[node] for paths in grown if node < paths.num_nodes) / len(grown)
            for node in range(longest)
        ]
        tokens = list(itertools.accumulate(gains))  # the anchor's own choice is one
        costs = {size: self.times.relative(size) for size in self._sizes_for(most)}
        best = max(costs, key=lambda size: tokens[min(size, most)] / costs[size])
        # Expected tokens vary less than found ones.
        rate = (self._expected + _OWN_ROUNDS * tokens[min(best, most)]) / (self._cost + _OWN_ROUNDS * costs[best])
        rate = max(rate, 1.0 / self.times.relative_plain())
        num_nodes = max(costs, key=lambda size: tokens[min(size, most)] - rate * costs[size])
        self._expected_tokens = tokens[min(num_nodes, most)]
        return num_nodes

    def _sizes_for(self, most: int) -> list[int]:
        """Sizes to choose from for trees of at most so many nodes, the next of the menu included."""
        if self.sizes is None:
            return list(range(1, most + 1))
        smaller = [size for size in self.sizes if size < most]
        return smaller + self.sizes[len(smaller) : len(smaller) + 1]


def _repeat(tokens: list[list[int]], slot: int, parent: int) -> int | None:
    """Rank of the candidate that has the token of its parent, which has rank `parent` in the slot before."""
    # The first slot's parent is the anchor, which the draft knows.
    token = tokens[slot - 1][parent] if slot else None
    return tokens[slot].index(token) if token in tokens[slot] else None


def _kind(rank: int, is_below_main: bool, repeat: int | None) -> int:
    if rank == repeat:
        return _REPEAT
    if not is_below_main:
        return _ASIDE
    return _OTHER if rank else _LIKELIEST


def _shifted(chance: float, shift: float) -> float:
    chance = min(max(1e-6, chance), 1 - 1e-6)  # in this order NaN, of a broken draft, becomes the smallest chance
    return 1.0 / (1.0 + math.exp(-min(math.log(chance / (1 - chance)) + shift, _LARGEST_LOG_ODDS)))
