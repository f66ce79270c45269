"""Hand-made drafters that force any accept pattern, and slow plain twins of the decode loop."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.generation.streamers import BaseStreamer

from dflash_hf import DFlashDraftModel, decoding_dflash

# Whether slot `slot` (1 is the token after the anchor) of the call's draft number `round_index` is right.
Pattern = Callable[[int, int], bool]


def always_right(round_index: int, slot: int) -> bool:
    return True


def never_right(round_index: int, slot: int) -> bool:
    return False


def right_at(*slots: int) -> Pattern:
    return lambda round_index, slot: slot in slots


def right_for(*proposals_per_round: int) -> Pattern:
    """The first `proposals_per_round[r]` slots of draft r are right, the next is wrong, later ones are right again."""

    def is_right(round_index: int, slot: int) -> bool:
        return slot != proposals_per_round[round_index % len(proposals_per_round)] + 1

    return is_right


@dataclass
class DraftCall:
    """One forward of a drafter."""

    num_features: int
    width: int
    positions: list[int]
    anchor_embedding: torch.Tensor
    hidden_states: torch.Tensor


class RecordingDrafter(DFlashDraftModel):
    """A drafter that writes down its forwards, and the proposals and accepted lengths of its generate() calls.

    `proposals` and `accepted_lengths` are those of the first row; `all_accepted_lengths` has every row's. The whole
    block is verified in every round, unless `is_cost_aware` is set or the call asks for `num_assistant_tokens`.
    """

    is_cost_aware = False

    def __init__(self, config):
        super().__init__(config)
        self.start_recording()

    def start_recording(self, rows: list[int] | None = None) -> None:
        self.calls: list[DraftCall] = []
        self.proposals: list[list[int]] = []
        self.all_accepted_lengths: list[list[int]] = [[]]
        self.rows = rows or [0]

    @property
    def accepted_lengths(self) -> list[int]:
        return self.all_accepted_lengths[0]

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        call = DraftCall(
            num_features=context_hidden_states.shape[1],
            width=noise_embeds.shape[1],
            positions=[] if position_ids is None else position_ids[0].tolist(),
            anchor_embedding=noise_embeds[0, 0].clone(),
            hidden_states=output.last_hidden_state.clone(),
        )
        self.calls.append(call)
        return output

    def candidate_generator(self, target, **kwargs):
        """Records the candidates of Transformers' own loop."""
        self.start_recording()
        generator = super().candidate_generator(target, **kwargs)
        self.all_accepted_lengths = [generator.accepted_lengths]
        get_candidates, proposals = type(generator).get_candidates, self.proposals

        class Recorder(type(generator)):
            def get_candidates(self, input_ids, *args, is_first_iteration=False, **kwargs):
                tokens, logits = get_candidates(
                    self, input_ids, *args, is_first_iteration=is_first_iteration, **kwargs
                )
                if not is_first_iteration:
                    proposals.append(tokens[0, input_ids.shape[1] :].tolist())
                return tokens, logits

        generator.__class__ = Recorder
        return generator


class RecordingCall(decoding_dflash.DecodeCall):
    """A decoding call that tells a `RecordingDrafter` what it does; other drafters notice nothing."""

    def __init__(self, drafter, *args, **kwargs):
        super().__init__(drafter, *args, **kwargs)
        if isinstance(drafter, RecordingDrafter):
            drafter.start_recording(self.rows)
            drafter.all_accepted_lengths = self.accepted_lengths
            if not drafter.is_cost_aware and self.policy.verify_length.fixed is None:
                self.policy.verify_length.fixed = drafter.config.block_size - 1

    def _propose(self):
        is_recording = isinstance(self.drafter, RecordingDrafter)
        if is_recording:
            self.drafter.rows = self.rows
        tree, scores = super()._propose()
        if is_recording and self.rows[0] == 0:
            self.drafter.proposals.append(tree.tokens[0, 1:].tolist())
        return tree, scores


decoding_dflash.DecodeCall = RecordingCall


class OracleDrafter(RecordingDrafter):
    """A drafter that knows the text, and proposes it where `is_right` says so and other tokens elsewhere.

    It finds its place in the text by the position of the anchor, so wrong positions give wrong proposals. The tokens
    are put into the hidden states, where any decode loop reads them through the target's head.

    Args:
        text: Prompt and continuation without padding, one list of ids a row, or a tensor of shape (rows, tokens); a
            block longer than what is generated.
        is_right: One pattern, or one for each row.
        decoy (`int`, *optional*): A token that is always more likely than the proposed one.
    """

    def __init__(
        self,
        config,
        target,
        text: torch.Tensor | list[list[int]],
        is_right: Pattern | list[Pattern] = always_right,
        decoy: int | None = None,
    ):
        super().__init__(config)
        self.text = text.tolist() if isinstance(text, torch.Tensor) else text
        self.is_right = is_right
        self._patterns = is_right if isinstance(is_right, list) else [is_right] * len(self.text)
        self.decoy = decoy
        head = target.get_output_embeddings().weight.detach().float()
        self._rows = 20.0 * head / head.pow(2).sum(dim=-1, keepdim=True).clamp_min(1e-6)
        self._is_readable = (self._rows @ head.T).argmax(dim=-1) == torch.arange(len(head))
        self.eval()

    def start_recording(self, rows: list[int] | None = None) -> None:
        super().start_recording(rows)
        self.num_drafts = [0] * (max(self.rows) + 1)

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        num_rows, width = noise_embeds.shape[:2]
        anchors = position_ids.expand(num_rows, -1)[:, -width].tolist()
        hidden_states = output.last_hidden_state.clone()
        for i, anchor in enumerate(anchors):
            row = self.rows[i]
            text = self.text[row]
            wanted = [
                self._token(row, slot, text[anchor + slot] if anchor + slot < len(text) else 0)
                for slot in range(1, width)
            ]
            hidden_states[i, 1:] = self._rows[wanted].to(hidden_states)
            self.num_drafts[row] += 1
        if self.decoy is not None:
            hidden_states[:, 1:] += 1.1 * self._rows[self.decoy].to(hidden_states)
        output.last_hidden_state = hidden_states
        return output

    def _token(self, row: int, slot: int, right: int) -> int:
        token, num_tokens = right, len(self._rows)
        if not self._patterns[row](self.num_drafts[row], slot):
            others = ((right + offset) % num_tokens for offset in range(1, num_tokens))
            token = next(other for other in others if self._is_readable[other])
        if not self._is_readable[token]:
            raise AssertionError(f"The head cannot read token {token} back; build the target with another seed.")
        return token


def expected_lengths(
    is_right: Pattern, max_new_tokens: int, block_size: int, *, num_proposals: int | None = None, stop_at: int = 10**9
) -> list[int]:
    """Accepted lengths that an oracle's pattern must give; `stop_at` is the count of new tokens at the first EOS."""
    lengths, num_drafts, num_new = [], 0, 1
    while num_new < min(max_new_tokens, stop_at):
        width = min(max_new_tokens - num_new - 1, num_proposals or block_size - 1)
        num_right = 0
        while num_right < width and is_right(num_drafts, num_right + 1):
            num_right += 1
        num_drafts += width > 0
        lengths.append(min(num_right + 1, stop_at - num_new))
        num_new += lengths[-1]
    return lengths


@torch.no_grad()
def reference_greedy(target, input_ids: torch.Tensor, max_new_tokens: int, eos: list[int] = ()) -> torch.Tensor:
    """Greedy text, one token at a time, the whole text through the target for each."""
    tokens = input_ids
    for _ in range(max_new_tokens):
        tokens = torch.cat([tokens, target(tokens, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
        if int(tokens[0, -1]) in eos:
            break
    return tokens


@dataclass
class ReferenceRun:
    tokens: torch.Tensor
    accepted_lengths: list[int] = field(default_factory=list)
    proposals: list[list[int]] = field(default_factory=list)


@torch.no_grad()
def reference_dflash_greedy(
    target,
    drafter,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    eos: list[int] = (),
    num_proposals: int | None = None,
) -> ReferenceRun:
    """DFlash decoding without any cache: each round reads the whole context again, with target and drafter."""
    max_length = input_ids.shape[1] + max_new_tokens
    run = ReferenceRun(reference_greedy(target, input_ids, 1))
    while run.tokens.shape[1] < max_length and int(run.tokens[0, -1]) not in eos:
        room = max_length - run.tokens.shape[1] - 1
        proposals = []
        if room > 0:
            drafted = reference_draft(target, drafter, run.tokens)
            proposals = drafted[: min(room, num_proposals or len(drafted))]
        block = torch.cat([run.tokens, torch.tensor([proposals], dtype=torch.long)], dim=1)
        choices = target(block, use_cache=False).logits[0, run.tokens.shape[1] - 1 :].argmax(dim=-1).tolist()
        num_right = 0
        while num_right < len(proposals) and proposals[num_right] == choices[num_right]:
            num_right += 1
        committed = choices[: num_right + 1]
        first_end = next((i for i, token in enumerate(committed) if token in eos), num_right)
        run.tokens = torch.cat([run.tokens, torch.tensor([committed[: first_end + 1]])], dim=1)
        run.accepted_lengths.append(first_end + 1)
        run.proposals.append(proposals)
    return run


@torch.no_grad()
def reference_draft(target, drafter, tokens: torch.Tensor) -> list[int]:
    """All proposals for the last of `tokens` as the anchor, from one drafter forward over the whole context."""
    config = drafter.config
    states = target(tokens[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[layer_id + 1] for layer_id in config.target_layer_ids], dim=-1)
    block = torch.cat([tokens[:, -1:], torch.full((1, config.block_size - 1), config.mask_token_id)], dim=1)
    if config.input_embedding_scale is None:
        noise_embeds = target.get_input_embeddings()(block)
    else:
        noise_embeds = target.get_input_embeddings().weight[block] * config.input_embedding_scale
    positions = torch.arange(tokens.shape[1] - 1 + config.block_size)[None]
    hidden_states = drafter(noise_embeds, features, position_ids=positions).last_hidden_state
    logits = target.get_output_embeddings()(hidden_states[0, 1:]) * config.output_multiplier
    if config.final_logit_softcapping:
        logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
    return logits.argmax(dim=-1).tolist()


class RecordingStreamer(BaseStreamer):
    """Keeps every put; the first is the prompt, the second the target's own first token, each later one a round."""

    def __init__(self, on_put: Callable[[], None] | None = None):
        self.puts: list[list[int]] = []
        self.has_ended = False
        self._on_put = on_put

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        if self._on_put is not None:
            self._on_put()

    def end(self) -> None:
        self.has_ended = True

    @property
    def tokens(self) -> list[int]:
        return [token for put in self.puts for token in put]

    @property
    def accepted_lengths(self) -> list[int]:
        return [len(put) for put in self.puts[2:]]
