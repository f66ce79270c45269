"""Slow plain twins of the clever parts: nested loops, one row, one block, one slot at a time."""

import itertools
import math

import torch


def visible_keys(
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_length: int,
    block_size: int,
    *,
    context_starts: torch.LongTensor | None = None,
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
            start = 0 if context_starts is None else int(context_starts[row, query_block])
            for query_slot in range(block_size):
                query = query_block * block_size + query_slot
                for position in range(context_length):
                    is_near = sliding_window is None or anchor + query_slot - position < sliding_window
                    is_before = start <= position < anchor
                    table[row, query, position] = bool(is_valid[row, query_block]) and is_before and is_near
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


def slot_loss(objective: str, logits: torch.Tensor, label: int, teacher_logits: torch.Tensor | None) -> torch.Tensor:
    """Loss of one slot from its logits of shape (vocab,), differentiable."""
    draft = logits.exp() / logits.exp().sum()
    if objective == "cross_entropy":
        return -draft[label].log()
    target = teacher_logits.exp() / teacher_logits.exp().sum()
    if objective == "kl":
        return (target * (target.log() - draft.log())).sum()
    return 0.5 * (target - draft).abs().sum()


def acceptance(logits: torch.Tensor, teacher_logits: torch.Tensor) -> float:
    """Probability that a token drawn from the drafter is kept: draw it, then keep it with probability min(1, p/q)."""
    draft, target = logits.softmax(dim=0).tolist(), teacher_logits.softmax(dim=0).tolist()
    return sum(q * min(1.0, p / q) for p, q in zip(target, draft, strict=True))


def d_pace_weight(label_probability: list[float], is_supervised: list[bool], slot: int, alpha: float) -> float:
    """Equations 7 and 8 of arXiv 2605.18810 for one slot of a block."""
    total = 0.0
    for last in range(slot, len(label_probability)):
        reached = 1.0
        for earlier in range(last + 1):
            if is_supervised[earlier]:
                reached *= (1 - alpha) * label_probability[earlier] + alpha
        total += reached if is_supervised[last] else 0.0
    return total if is_supervised[slot] else 0.0


def weighted_loss(
    hidden_states: torch.Tensor,
    labels: torch.LongTensor,
    weights: torch.Tensor,
    head,
    *,
    objective: str = "cross_entropy",
    label_source: str = "data",
    teacher_logits: torch.Tensor | None = None,
    d_pace_alpha: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.BoolTensor]:
    """Loss sum, weight sum and hits, one slot at a time; arguments as in [`dflash_loss`].

    Args:
        teacher_logits (`torch.Tensor`, *optional*): The target's logits of every slot, shape (..., block_size, vocab).
    """
    loss_sum, weight_sum = hidden_states.new_zeros(()), weights.new_zeros(())
    hits = []
    width, block_size = hidden_states.shape[-1], labels.shape[-1]
    states, labels, weights = (
        hidden_states.view(-1, block_size, width),
        labels.view(-1, block_size),
        weights.flatten(0, -2),
    )
    for block in range(labels.shape[0]):
        logits = [head(states[block, slot]) for slot in range(block_size)]
        teachers = [None] * block_size
        if teacher_logits is not None:
            teachers = list(teacher_logits.reshape(-1, block_size, logits[0].shape[0])[block])
        own_labels = labels[block].tolist() if label_source == "data" else [int(t.argmax()) for t in teachers]
        probability = [
            float(one.detach().softmax(dim=0)[label]) for one, label in zip(logits, own_labels, strict=True)
        ]
        is_supervised = [float(weight) != 0 for weight in weights[block]]
        for slot in range(block_size):
            hits.append(is_supervised[slot] and int(logits[slot].argmax()) == own_labels[slot])
            if not is_supervised[slot]:
                continue
            weight = weights[block, slot]
            weight_sum = weight_sum + weight
            if d_pace_alpha is not None:
                weight = weight * d_pace_weight(probability, is_supervised, slot, d_pace_alpha)
            loss_sum = loss_sum + weight * slot_loss(objective, logits[slot], own_labels[slot], teachers[slot])
    return loss_sum, weight_sum, torch.tensor(hits, dtype=torch.bool)


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


def best_paths(children, num_slots: int, num_ranks: int, num_nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """The likeliest paths under an anchor, as ranks by slot, from the table of all paths.

    Args:
        children (`Callable`): As `grow_paths` takes them: from a slot, whether all nodes before have rank 0, and the
            rank of the last one, to (chance, rank) of each candidate.
    """
    paths = []
    for depth in range(1, num_slots + 1):
        for ranks in itertools.product(range(num_ranks), repeat=depth):
            chance = 1.0
            for slot, rank in enumerate(ranks):
                before = ranks[:slot]
                candidates = children(slot, not any(before), before[-1] if before else 0)
                chance *= next(chance for chance, other in candidates if other == rank)
            paths.append((ranks, chance))
    return sorted(paths, key=lambda path: -path[1])[:num_nodes]


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


def draft_alone(
    drafter,
    noise_embeds: torch.Tensor,
    context_hidden_states: torch.Tensor,
    anchors: torch.LongTensor,
    is_valid: torch.BoolTensor,
    context_starts: torch.LongTensor,
) -> torch.Tensor:
    """Hidden states of every block by a forward of its own, without a mask; zeros for unused blocks.

    Args:
        noise_embeds (`torch.Tensor`): Shape (batch, N, block_size, D).
        context_hidden_states (`torch.Tensor`): Shape (batch, context, features).
        context_starts (`torch.LongTensor`): Where the anchor's document begins, shape (batch, N).
    """
    rows = []
    for row in range(anchors.shape[0]):
        for block in range(anchors.shape[1]):
            if not is_valid[row, block]:
                rows.append(torch.zeros_like(noise_embeds[row, block]))
                continue
            start, anchor = int(context_starts[row, block]), int(anchors[row, block])
            own = drafter(
                noise_embeds=noise_embeds[row, block][None],
                context_hidden_states=context_hidden_states[row, start:anchor][None],
            )
            rows.append(own.last_hidden_state[0])
    return torch.stack(rows).view_as(noise_embeds)
