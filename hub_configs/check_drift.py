"""How far a quantised or fine-tuned target's tapped layers have moved from those that a drafter was trained on."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from dflash_hf.hub_configs.check_report import Finding
from dflash_hf.target_dflash import TargetTaps
from dflash_hf.trainer.target_features import input_device

_FAR = 0.95
_ADVICE = (
    "the drafter reads features that it was not trained on: compare tau with that on the reference, or train the "
    "drafter on this target"
)


@torch.no_grad()
def tap_cosines(
    target: PreTrainedModel, reference: PreTrainedModel, layer_ids: Sequence[int], prompts: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Mean cosine between the two targets' outputs of each tapped layer, over all tokens of the prompts.

    Args:
        target, reference ([`PreTrainedModel`]): Targets of one shape, such as a quantised one and its original.
        layer_ids: Decoder layers, as in the drafter's config.
        prompts: Token ids of each prompt.
    Raises:
        ValueError: If the two have features of different sizes.
    """
    sums = torch.zeros(len(layer_ids), dtype=torch.float64)
    for prompt in prompts:
        ours, theirs = (_features(model, layer_ids, prompt) for model in (target, reference))
        if ours.shape != theirs.shape:
            raise ValueError(
                f"The target has features of shape {tuple(ours.shape)}, the reference of {tuple(theirs.shape)}: it "
                "must be the model that the target was made from."
            )
        sums += torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).sum(dim=1)
    num_tokens = sum(map(len, prompts))
    return dict(zip(layer_ids, (sums / num_tokens).tolist(), strict=True))


def check_drift(cosines: dict[int, float]) -> Finding:
    """The finding about cosines from [`tap_cosines`]; below 0.95 in any layer it is a warning."""
    worst = min(cosines, key=cosines.__getitem__)
    text = ", ".join(f"layer {layer} {cosine:.4f}" for layer, cosine in cosines.items())
    if cosines[worst] < _FAR:
        return Finding("drift", "warning", f"mean cosine with the reference's taps: {text}", _ADVICE)
    return Finding("drift", "ok", f"mean cosine with the reference's taps: {text}")


def _features(model: PreTrainedModel, layer_ids: Sequence[int], prompt: Sequence[int]) -> torch.Tensor:
    """Shape (layers, tokens, hidden size), float64, on the CPU."""
    with TargetTaps(model, list(layer_ids)) as taps:
        model(input_ids=torch.tensor([list(prompt)], device=input_device(model)), use_cache=False)
        features = taps.take()
    return torch.stack(features[0].double().cpu().chunk(len(layer_ids), dim=-1))
