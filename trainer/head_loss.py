"""From draft hidden states to the loss: the target's head, its own logits where the objective asks for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dflash_hf.target_dflash import draft_logits, shape_logits
from dflash_hf.trainer.anchors import row_generator
from dflash_hf.trainer.loss import DFlashLossOutput, dflash_loss, sample_candidates
from dflash_hf.trainer.target_features import target_logits
from dflash_hf.trainer.training_args import DFlashTrainingArguments


def head_loss(
    target: PreTrainedModel,
    hidden_states: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    config: Any,
    args: DFlashTrainingArguments,
    *,
    final_hidden: torch.Tensor | None = None,
    sampling_key: tuple[int, int] | None = None,
) -> DFlashLossOutput:
    """Loss sums of a batch, with the objective of `args`; see [`dflash_loss`].

    Args:
        hidden_states (`torch.Tensor`): The drafter's, shape (batch, N, block_size, D).
        inputs (`dict`): A batch of [`AnchorCollator`].
        config ([`DFlashConfig`]): The drafter's config.
        final_hidden (`torch.Tensor`, *optional*): The target's last hidden states, shape (batch, tokens, D), for
            objectives that read its logits.
        sampling_key (`tuple[int, int]`, *optional*): Step and process, which seed the sampled softmax of
            `args.sampled_negatives`; None takes the whole vocabulary.
    """
    labels, weights = inputs["labels"], inputs["weights"]
    options = {
        "chunk_size": args.head_chunk_size,
        "active": inputs["active"],
        "d_pace_alpha": args.d_pace_alpha,
    }
    if sampling_key is None or args.sampled_negatives is None:
        return dflash_loss(
            hidden_states,
            labels,
            weights,
            lambda chunk: draft_logits(target, chunk, config),
            objective=args.objective,
            label_source=args.label_source,
            teacher=None if final_hidden is None else _teacher(target, final_hidden, inputs["anchors"], labels),
            **options,
        )
    head = target.get_output_embeddings()
    candidates, new_labels, offset = sample_candidates(
        labels, head.weight.shape[0], args.sampled_negatives, generator=row_generator(args.seed, *sampling_key)
    )
    rows = head.weight[candidates]
    return dflash_loss(
        hidden_states,
        new_labels,
        weights,
        lambda chunk: shape_logits(nn.functional.linear(chunk.to(rows.dtype), rows), config),
        logit_offset=offset,
        **options,
    )


def _teacher(
    target: PreTrainedModel, final_hidden: torch.Tensor, anchors: torch.LongTensor, labels: torch.LongTensor
) -> Callable[[torch.LongTensor], torch.Tensor]:
    """Maps flat slot indices to the target's logits for the token that the slot predicts."""
    num_tokens, block_size = final_hidden.shape[1], labels.shape[2]
    # The token at anchor + k is predicted from the hidden state at anchor + k - 1.
    columns = anchors[:, :, None] + torch.arange(block_size, device=anchors.device) - 1
    rows = torch.arange(anchors.shape[0], device=anchors.device)[:, None, None] * num_tokens
    places = (columns.clamp(0, num_tokens - 1) + rows).flatten()
    flat = final_hidden.flatten(0, 1)
    return lambda index: target_logits(target, flat[places[index]])
