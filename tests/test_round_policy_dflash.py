"""What a call learns about chances is kept in memory for the next one; times are not."""

import copy
import gc

import pytest
from generation_material import generate, make_drafter, make_target
from torch import nn

from dflash_hf import round_policy_dflash
from dflash_hf.round_policy_dflash import KeptChances
from dflash_hf.tree_budget_dflash import ChanceCalibration


class Model(nn.Module):
    pass


def test_chances_are_kept_as_copies_for_each_pair_and_apart_for_sampling():
    kept, target, drafter, calibration = KeptChances(), Model(), Model(), ChanceCalibration()
    assert kept.get(target, drafter, False) is None
    calibration.learn([[3, 4]], [[0.5, 0.3]], [3])
    learned = copy.deepcopy(calibration._shifts)
    kept.put(target, drafter, False, calibration)
    calibration.learn([[3, 4]], [[0.5, 0.3]], [4])
    kept.get(target, drafter, False).learn([[3, 4]], [[0.5, 0.3]], [4])
    assert kept.get(target, drafter, False)._shifts == learned != calibration._shifts
    assert kept.get(target, drafter, True) is None
    assert kept.get(target, Model(), False) is None and kept.get(Model(), drafter, False) is None


def test_chances_go_away_with_their_models():
    kept, target, drafter = KeptChances(), Model(), Model()
    kept.put(target, drafter, False, ChanceCalibration())
    del drafter
    gc.collect()
    assert all(len(by_drafter) == 0 for by_drafter in kept._by_target.values())
    kept.put(target, Model(), False, ChanceCalibration())
    del target
    gc.collect()
    assert len(kept._by_target) == 0


@pytest.mark.parametrize("options", [{}, {"num_tree_nodes": "auto"}], ids=["chain", "tree"])
def test_next_call_measures_its_own_times_and_keeps_what_chances_are_worth(options, monkeypatch):
    target = make_target("llama")
    drafter = make_drafter(target)
    drafter.is_cost_aware = True
    at_start, policies = [], []
    original = round_policy_dflash.RoundPolicy.__init__

    def recording(self, *args, **kwargs):
        original(self, *args, **kwargs)
        policies.append(self)
        policy = self.tree_budget or self.verify_length
        # Times follow the length of the text: those of a long one may not pass for those of a short one.
        at_start.append((policy.times.num_plain, policy.times.drafted_sizes))
        if self.tree_budget is not None:
            at_start[-1] += (copy.deepcopy(policy.calibration._shifts),)

    monkeypatch.setattr(round_policy_dflash.RoundPolicy, "__init__", recording)
    texts = [generate(target, assistant_model=drafter, **options).tolist() for _ in range(2)]
    assert texts[0] == texts[1] == generate(target).tolist()
    assert all(start[:2] == (0, []) for start in at_start)
    assert all((policy.tree_budget or policy.verify_length).times.drafted_sizes for policy in policies)
    if "num_tree_nodes" in options:
        assert at_start[1][2] == policies[0].tree_budget.calibration._shifts != at_start[0][2]
    assert not any("times" in name or "dflash" in name for name in vars(target))
