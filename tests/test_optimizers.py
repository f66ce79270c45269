import copy

import pytest
import torch

from dflash_hf.trainer.optimizers import MuonWithAdamW

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4))


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_matrices_move_by_muon_and_the_rest_by_adamw():
    model = make_model()
    twins = copy.deepcopy(model)
    matrices = [parameter for parameter in twins.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in twins.parameters() if parameter.ndim != 2]
    parts = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.02, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    optimizer = MuonWithAdamW(model, **OPTIONS)
    for step in range(3):
        set_gradients(model, step)
        set_gradients(twins, step)
        optimizer.step()
        for part in parts:
            part.step()
    for parameter, twin in zip(model.parameters(), twins.parameters(), strict=True):
        assert torch.equal(parameter, twin)


def test_scheduler_reaches_both_parts_and_state_survives_a_restart():
    model = make_model()
    optimizer = MuonWithAdamW(model, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 / 3] * 2)
    resumed_model = copy.deepcopy(model)
    resumed = MuonWithAdamW(resumed_model, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in ((model, optimizer), (resumed_model, resumed)):
        set_gradients(one, 9)
        other.step()
    for parameter, twin in zip(model.parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(parameter, twin)


def test_frozen_weights_stay_and_a_closure_is_refused():
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = MuonWithAdamW(model, **OPTIONS)
    set_gradients(model, 0)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
