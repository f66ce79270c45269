import pytest
import torch

from dflash_hf.trainer.ema import WeightAverage


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[1].requires_grad_(False)
    return model


def test_average_follows_the_weights_by_hand():
    model = make_model()
    start = model[0].weight.detach().clone()
    average = WeightAverage(model, 0.9)
    assert set(average.average) == {"0.weight", "0.bias"}
    expected = start
    for step in range(3):
        with torch.no_grad():
            model[0].weight += step + 1.0
        average.update(model)
        expected = 0.9 * expected + 0.1 * model[0].weight.detach()
    torch.testing.assert_close(average.average["0.weight"], expected)


def test_average_is_applied_inside_and_taken_back_even_after_an_error():
    model = make_model()
    average = WeightAverage(model, 0.5)
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight += 1
    own = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match="stop"), average.applied_to(model):
        assert torch.equal(model[0].weight, start)
        raise RuntimeError("stop")
    assert torch.equal(model[0].weight, own)
    average.copy_to(model)
    assert torch.equal(model[0].weight, start)


def test_half_precision_weights_have_a_float32_average():
    model = make_model().to(torch.bfloat16)
    average = WeightAverage(model, 0.999)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    before = average.average["0.weight"].clone()
    average.update(model)
    assert average.average["0.weight"].dtype == torch.float32
    torch.testing.assert_close(average.average["0.weight"], before + 0.001 * (1 - before))


def test_average_survives_a_file_and_names_what_is_wrong_with_one(tmp_path):
    model = make_model()
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model[0].weight += 1
    average.update(model)
    average.save(tmp_path / "average.safetensors")
    again = WeightAverage(make_model(), 0.9)
    again.load(tmp_path / "average.safetensors")
    assert all(torch.equal(again.average[name], average.average[name]) for name in average.average)
    with pytest.raises(ValueError, match="none.safetensors is missing"):
        again.load(tmp_path / "none.safetensors")
    other = WeightAverage(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)), 0.9)
    with pytest.raises(ValueError, match=r"lacks \['1.bias', '1.weight'\]"):
        other.load(tmp_path / "average.safetensors")
