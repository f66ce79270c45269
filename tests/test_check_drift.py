import pytest
import torch
from conftest import make_tiny_target
from tiny_material import make_drafter_config

from dflash_hf import DFlashDraftModel
from dflash_hf.hub_configs.check import check_drafter
from dflash_hf.hub_configs.check_drift import check_drift, tap_cosines

TOKEN_IDS = [[5, 17, 3, 42, 8, 29], [7, 9, 11]]


def quantised(bits: int):
    """The tiny target with every weight matrix rounded to so many bits, one scale per row."""
    target = make_tiny_target()
    for layer in target.model.layers:
        for weight in (parameter.data for parameter in layer.parameters() if parameter.dim() == 2):
            scale = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            weight.copy_((weight / scale).round() * scale)
    return target


def test_an_equal_target_has_cosines_of_one():
    cosines = tap_cosines(make_tiny_target(), make_tiny_target(), [1, 5], TOKEN_IDS)
    assert cosines == pytest.approx({1: 1.0, 5: 1.0})
    assert check_drift(cosines).level == "ok"


def test_coarser_weights_drift_further_and_deeper_layers_most():
    fine, coarse = (tap_cosines(quantised(bits), make_tiny_target(), [1, 5], TOKEN_IDS) for bits in (8, 4))
    assert 1 > fine[1] > coarse[1] and fine[5] > coarse[5] and coarse[1] > coarse[5]


def test_cosines_are_means_over_tokens():
    target, reference = quantised(4), make_tiny_target()
    expected = []
    for ids in TOKEN_IDS:
        inputs = {"input_ids": torch.tensor([ids]), "output_hidden_states": True}
        with torch.no_grad():
            ours, theirs = (model(**inputs).hidden_states[3][0] for model in (target, reference))
        expected += torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).tolist()
    assert tap_cosines(target, reference, [2], TOKEN_IDS)[2] == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_a_target_that_moved_far_is_a_warning_of_the_check():
    moved = quantised(2)
    drafter = DFlashDraftModel(make_drafter_config(moved))
    report = check_drafter(moved, drafter, prompts=TOKEN_IDS, max_new_tokens=4, reference=make_tiny_target())
    (finding,) = [finding for finding in report.findings if finding.subject == "drift"]
    assert finding.level == "warning" and "layer" in finding.text
    assert min(value for name, value in report.metrics.items() if name.startswith("tap_cosine")) < 0.95


def test_a_reference_of_another_size_is_refused():
    with pytest.raises(ValueError, match="must be the model that the target was made from"):
        tap_cosines(make_tiny_target(), make_tiny_target(hidden_size=16, num_attention_heads=2), [1], TOKEN_IDS)
