"""A target and drafters given by tables of chances, exact laws of their texts, and a test of frequencies."""

import itertools
import math

import torch
from generation_material import make_config, make_target
from oracle_drafters import RecordingDrafter

from dflash_hf.tree_dflash import TokenTree

VOCABULARY = 6
_SCALE = 4.0  # norm of a hidden state of 16 entries after RMSNorm


def make_table_target(laws: torch.Tensor):
    """A target whose next token follows row `t` of `laws` after token `t`; its logits are their logarithms."""
    target = make_target("llama", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, pad_token_id=None)
    head = target.lm_head.weight.data.zero_()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = target.model.embed_tokens.weight.zero_()
        embedding[:, :VOCABULARY] = _SCALE * torch.eye(VOCABULARY)
    head[:, :VOCABULARY] = laws.clamp_min(1e-9).log().T / _SCALE
    # The target's hidden states are zero here, so this is the drafter's own way to the logits.
    head[:, VOCABULARY : 2 * VOCABULARY] = torch.eye(VOCABULARY)
    return target


class TableDrafter(RecordingDrafter):
    """A drafter with fixed logits for each anchor: `table` has shape (anchors, slots, vocabulary)."""

    def __init__(self, target, table: torch.Tensor):
        overrides = {"num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": VOCABULARY - 1}
        super().__init__(make_config(target, **overrides, block_size=table.shape[1] + 1))
        self.table = table
        self.eval()

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        anchors = noise_embeds[:, 0, :VOCABULARY].argmax(dim=-1)
        hidden_states = torch.zeros_like(output.last_hidden_state)
        hidden_states[:, 1:, VOCABULARY : 2 * VOCABULARY] = self.table[anchors]
        output.last_hidden_state = hidden_states
        return output


def random_laws(seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).softmax(dim=-1)


def draft_table(kind: str, laws: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Draft logits: "random", the target's slot "marginals", or almost surely its "likely" or "unlikely" tokens."""
    if kind == "random":
        generator = torch.Generator().manual_seed(6)
        return torch.randn(VOCABULARY, num_slots, VOCABULARY, generator=generator)
    if kind == "marginals":
        powers = [torch.linalg.matrix_power(laws, slot + 1) for slot in range(num_slots)]
        return torch.stack(powers, dim=1).clamp_min(1e-9).log()
    table = torch.zeros(VOCABULARY, num_slots, VOCABULARY)
    for anchor in range(VOCABULARY):
        token = anchor
        for slot in range(num_slots):
            token = int(laws[token].argmax() if kind == "likely" else laws[token].argmin())
            table[anchor, slot, token] = 12.0
    return table


def processed_law(
    logits: list[float],
    prefix: list[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> list[float]:
    """The law of the next token by plain arithmetic, with processors in the order of `generate`."""
    scores = list(logits)
    for token in set(prefix):
        scores[token] *= repetition_penalty if scores[token] < 0 else 1.0 / repetition_penalty
    law = _normalised([math.exp(score / temperature) for score in scores])
    ranked = sorted(range(len(law)), key=lambda token: -law[token])
    if top_k:
        law = _normalised([p if token in ranked[:top_k] else 0.0 for token, p in enumerate(law)])
    law = _keep_mass(law, ranked, top_p)
    law = _normalised([p if p >= min_p * max(law) else 0.0 for p in law])
    entropy = -sum(p * math.log(p) for p in law if p)
    by_surprise = sorted((token for token in ranked if law[token]), key=lambda t: abs(-math.log(law[t]) - entropy))
    return _keep_mass(law, by_surprise, typical_p)


def text_law(laws: torch.Tensor, prompt: list[int], num_tokens: int, **settings) -> dict[tuple[int, ...], float]:
    """How likely each continuation of `num_tokens` tokens is."""
    logits = laws.clamp_min(1e-9).log().tolist()
    chances = {}
    for text in itertools.product(range(VOCABULARY), repeat=num_tokens):
        chance, prefix = 1.0, list(prompt)
        for token in text:
            chance *= processed_law(logits[prefix[-1]], prefix, **settings)[token] if chance else 0.0
            prefix.append(token)
        chances[text] = chance
    return chances


def p_value(texts: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """How likely frequencies as uneven as those of `texts` are under `law`; 0 if a text is impossible."""
    counts = dict.fromkeys(law, 0)
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    if any(count and law.get(text, 0.0) < 1e-7 for text, count in counts.items()):
        return 0.0
    expected = {text: chance * len(texts) for text, chance in law.items()}
    frequent = [text for text in law if expected[text] >= 5.0]
    bins = [(counts[text], expected[text]) for text in frequent]
    rest = len(texts) - sum(found for found, _ in bins), len(texts) - sum(wanted for _, wanted in bins)
    if rest[1] > 1.0:
        bins.append(rest)
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def two_branches(logits: torch.Tensor, anchors: torch.LongTensor) -> TokenTree:
    """The two likeliest tokens after the anchor, each followed by the likeliest tokens of the later slots."""
    best = logits.argmax(dim=-1)
    first = logits[:, 0].topk(2, dim=-1).indices
    tokens, parents = [anchors, first], [-1, 0, 0]
    for slot in range(1, logits.shape[1]):
        tokens.append(best[:, slot : slot + 1].expand(-1, 2))
        parents += [2 * slot - 1, 2 * slot]
    return TokenTree(torch.cat(tokens, dim=1), [parents] * len(anchors))


def _keep_mass(law: list[float], order: list[int], mass: float) -> list[float]:
    kept, total = set(), 0.0
    for token in order:
        if total < mass:
            kept.add(token)
            total += law[token]
    return _normalised([p if token in kept else 0.0 for token, p in enumerate(law)])


def _normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]
