"""What a decoding call returns: the outputs of plain `generate`, and the accepted lengths."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """The outputs of plain `generate`, and how many tokens each verify forward committed.

    Scores, logits, hidden states and attentions come one entry a token, as from plain `generate`. After the end of a
    row of a batch, its scores and logits put everything on the pad token, and its states are zero. The cache is left
    out (None) where rows of a batch have different numbers of tokens, or, if it is static, ended in different rounds.

    Args:
        accepted_lengths (`list[list[int]]`): For each row, the tokens that each verify forward committed, bonus token
            included. The target's first forward, which reads the prompt and gives one token, is not among them.
    """

    accepted_lengths: list[list[int]] | None = None

    @property
    def tau(self) -> float:
        """Mean accepted length over all rounds and rows; 1.0 if there was no round."""
        lengths = [length for row in self.accepted_lengths or () for length in row]
        return sum(lengths) / len(lengths) if lengths else 1.0


class OutputRecorder:
    """Collects what `return_dict_in_generate` asks for, token by token.

    Args:
        generation_config ([`GenerationConfig`]): Says which outputs are asked for.
        num_rows (`int`): Rows of the batch.
    """

    def __init__(self, generation_config: GenerationConfig, num_rows: int):
        is_dict = bool(generation_config.return_dict_in_generate)
        self.is_dict = is_dict
        self.has_scores = is_dict and bool(generation_config.output_scores)
        self.has_logits = is_dict and bool(generation_config.output_logits)
        self.has_states = is_dict and bool(generation_config.output_hidden_states)
        self.has_attentions = is_dict and bool(generation_config.output_attentions)
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]
        self._prefill_states: tuple[torch.Tensor, ...] | None = None
        self._prefill_attentions: tuple[torch.Tensor, ...] | None = None
        self._states: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(num_rows)]
        self._attentions: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(num_rows)]

    def add_prefill(self, outputs: Any) -> None:
        """Takes in the states of the forward that read the prompt."""
        self._prefill_states = outputs.hidden_states if self.has_states else None
        self._prefill_attentions = outputs.attentions if self.has_attentions else None

    def add_step(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Takes in processed scores and raw logits of one token of a row, each of shape (vocab_size,)."""
        if self.has_scores:
            self._scores[row].append(scores.clone())
        if self.has_logits:
            self._logits[row].append(logits.clone())

    def scores_so_far(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """Scores of a row's steps, each of shape (1, vocab_size), if scores are recorded."""
        return tuple(step[None] for step in self._scores[row]) if self.has_scores else None

    def add_block(self, outputs: Any, num_nodes: int, paths: list[list[int]], rows: list[int], cache: Any) -> None:
        """Takes in the states of the accepted nodes of a verify forward; attentions of a single row only.

        Args:
            num_nodes (`int`): Nodes that the forward read.
            rows (`list[int]`): The batch row of each row of the forward.
            cache ([`Cache`]): The cache that the forward used.
        """
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            for depth, node in enumerate(path):
                if self.has_states:
                    self._states[row].append(tuple(states[i, node : node + 1] for states in outputs.hidden_states))
                if self.has_attentions:
                    layers = zip(outputs.attentions, cache.layers, strict=True)
                    self._attentions[row].append(
                        tuple(_seen_keys(weights, layer, num_nodes, path[: depth + 1]) for weights, layer in layers)
                    )

    def result(
        self, sequences: torch.LongTensor, num_new: list[int], pad_id: int, cache: Any, accepted: list[list[int]]
    ) -> "DFlashGenerateOutput | torch.LongTensor":
        """The ids, or the output that was asked for.

        Args:
            sequences (`torch.LongTensor`): Prompts and new tokens, padded, shape (rows, tokens).
            num_new (`list[int]`): New tokens of each row.
            pad_id (`int`): The token that fills shorter rows.
            cache ([`Cache`], *optional*): The cache to hand out.
            accepted (`list[list[int]]`): Accepted lengths of each row.
        """
        if not self.is_dict:
            return sequences
        steps = max(num_new)
        fields = {
            "sequences": sequences,
            "scores": self._stack_scores(self._scores, steps, pad_id) if self.has_scores else None,
            "logits": self._stack_scores(self._logits, steps, pad_id) if self.has_logits else None,
            "hidden_states": self._stack_states(steps) if self.has_states else None,
            "attentions": (self._prefill_attentions, *self._attentions[0]) if self.has_attentions else None,
            "accepted_lengths": accepted,
        }
        # Transformers before 5.24 calls the cache `past_key_values`.
        cache_name = "cache" if "cache" in DFlashGenerateOutput.__dataclass_fields__ else "past_key_values"
        return DFlashGenerateOutput(**fields, **{cache_name: cache})

    @staticmethod
    def _stack_scores(rows: list[list[torch.Tensor]], steps: int, pad_id: int) -> tuple[torch.Tensor, ...]:
        after_end = torch.full_like(rows[0][0], -torch.inf)
        after_end[pad_id] = 0.0
        return tuple(
            torch.stack([row[step] if step < len(row) else after_end for row in rows]) for step in range(steps)
        )

    def _stack_states(self, steps: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        first = self._prefill_states
        assert first is not None
        stacked = [first]
        for step in range(steps - 1):
            stacked.append(
                tuple(
                    torch.stack(
                        [
                            row[step][i] if step < len(row) else states.new_zeros(states[0, :1].shape)
                            for row in self._states
                        ]
                    )
                    for i, states in enumerate(first)
                )
            )
        return tuple(stacked)


def _seen_keys(weights: torch.Tensor, layer: Any, num_nodes: int, path: list[int]) -> torch.Tensor:
    """Attention weights of the last node of `path`, over the keys that plain decoding has at this token."""
    node = path[-1]
    if hasattr(layer, "max_cache_len"):
        return weights[:, :, node : node + 1]
    num_text = weights.shape[-1] - num_nodes
    seen = weights[:, :, node : node + 1, list(range(num_text)) + [num_text + ancestor for ancestor in path]]
    window = getattr(layer, "sliding_window", None)
    return seen if window is None else seen[..., -window:]
