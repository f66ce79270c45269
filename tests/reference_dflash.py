"""Slow plain twins of the clever parts: nested loops, one row, one block, one slot at a time."""

import math

import torch


def visible_keys(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.BoolTensor:
    """The table that [`block_mask_dense`] builds, entry by entry.

    Returns:
        `torch.BoolTensor` of shape (batch, N * block_size, context_length + N * block_size).
    """
    batch, num_anchors = anchors.shape
    num_slots = num_anchors * block_size
    table = torch.zeros(batch, num_slots, context_length + num_slots, dtype=torch.bool)
    for row in range(batch):
        for query_block in range(num_anchors):
            anchor = int(anchors[row, query_block])
            for query_slot in range(block_size):
                query = query_block * block_size + query_slot
                for position in range(context_length):
                    is_near = sliding_window is None or anchor + query_slot - position < sliding_window
                    table[row, query, position] = bool(is_valid[row, query_block]) and position < anchor and is_near
                for key_slot in range(block_size):
                    distance = query_slot - key_slot
                    is_near = sliding_window is None or abs(distance) < sliding_window
                    key = context_length + query_block * block_size + key_slot
                    table[row, query, key] = is_near and (distance >= 0 or not is_causal)
    return table


def anchor_candidates(loss_mask: list[int]) -> list[int]:
    """Positions that the target wrote and after which it wrote another token."""
    return [position for position in range(len(loss_mask) - 1) if loss_mask[position] and loss_mask[position + 1]]


def block_targets(
    input_ids: list[int], loss_mask: list[int], anchor: int, slot_weights: list[float]
) -> tuple[list[int | None], list[float]]:
    """Label and weight of every slot of one block; the label is None where the weight is 0."""
    labels: list[int | None] = []
    weights: list[float] = []
    is_reached = True
    for slot, weight in enumerate(slot_weights):
        position = anchor + slot
        is_reached = is_reached and position < len(input_ids) and bool(loss_mask[position])
        has_weight = is_reached and weight > 0
        labels.append(input_ids[position] if has_weight else None)
        weights.append(weight if has_weight else 0.0)
    return labels, weights


def weighted_cross_entropy(
    hidden_states: torch.Tensor, labels: torch.LongTensor, weights: torch.Tensor, head
) -> tuple[torch.Tensor, torch.Tensor, torch.BoolTensor]:
    """Loss sum, weight sum and hits, one slot at a time; arguments as in [`dflash_loss`]."""
    loss_sum = hidden_states.new_zeros(())
    weight_sum = weights.new_zeros(())
    is_correct = torch.zeros(labels.numel(), dtype=torch.bool)
    slots = zip(hidden_states.flatten(0, -2), labels.flatten(), weights.flatten(), strict=True)
    for index, (state, label, weight) in enumerate(slots):
        if weight == 0:
            continue
        logits = head(state)
        loss_sum = loss_sum + weight * (logits.exp().sum().log() - logits[label])
        weight_sum = weight_sum + weight
        is_correct[index] = int(logits.argmax()) == int(label)
    return loss_sum, weight_sum, is_correct.view(labels.shape)


def decay_weight(slot: int, gamma: float) -> float:
    """Equation 4 of arXiv 2602.06036 for one slot."""
    return 0.0 if slot == 0 else math.exp(-(slot - 1) / gamma)


def accepted_length(proposals: list[int], answer: list[int]) -> int:
    """Tokens that one verify commits: the right proposals before the first wrong one, plus the bonus token."""
    length = 1
    for proposal, token in zip(proposals, answer, strict=False):
        if proposal != token:
            break
        length += 1
    return length


def speculative_sampling_law(
    target_laws: list[list[float]], draft_laws: list[list[float]], proposals: list[int]
) -> dict[tuple[int, ...], float]:
    """How likely each text is to be committed for these proposals: algorithm 1 of arXiv 2211.17192, token by token.

    Args:
        target_laws (`list[list[float]]`): The target's law after the anchor and after each proposal.
        draft_laws (`list[list[float]]`): The laws that the proposals were drawn from.
    """
    chances: dict[tuple[int, ...], float] = {}
    reached, kept = 1.0, ()
    for target, draft, proposal in zip(target_laws, draft_laws, proposals, strict=False):
        keep = min(1.0, target[proposal] / draft[proposal])
        rest = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
        for token, mass in enumerate(rest):
            if keep < 1.0 and mass > 0.0:
                chances[(*kept, token)] = reached * (1.0 - keep) * mass / sum(rest)
        reached *= keep
        kept = (*kept, proposal)
    for token, mass in enumerate(target_laws[len(proposals)]):
        chances[(*kept, token)] = reached * mass
    return chances


@torch.no_grad()
def context_features(target, input_ids: torch.LongTensor, layer_ids: list[int]) -> torch.Tensor:
    """Outputs of the tapped layers for `input_ids` of shape (1, tokens), from the target's own `hidden_states`."""
    hidden_states = target(input_ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1)


@torch.no_grad()
def draft_block(drafter, target, input_ids: torch.LongTensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of the block whose anchor is `input_ids[0, anchor]`, as generation sees it.

    The target reads only what lies before the anchor; there is no cache.

    Returns:
        Shapes (block_size, D) and (block_size, vocab_size).
    """
    config = drafter.config
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = input_ids[0, anchor]
    hidden_states = drafter(
        noise_embeds=target.get_input_embeddings()(block),
        context_hidden_states=context_features(target, input_ids[:, :anchor], config.target_layer_ids),
        position_ids=torch.arange(anchor + config.block_size)[None],
    ).last_hidden_state
    return hidden_states[0], target.get_output_embeddings()(hidden_states)[0]
