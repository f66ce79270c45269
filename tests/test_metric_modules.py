import doctest
import statistics
from pathlib import Path

import evaluate
import pytest

from dflash_hf.eval import metrics
from dflash_hf.eval.metric_folders import metric_module

NAMES = ("accepted_length", "decode_speedup", "identical_output")
ACCEPTED_LENGTHS = [[4, 2, 1], [1], [], [2, 2, 2, 4], [3], [4, 1]]
SECONDS, TOKENS = [5.0, 2.5, 3.0, 4.0], [10, 10, 12, 8]
BASELINE_SECONDS, BASELINE_TOKENS = [5.0, 25.0, 12.0, 8.0], [10, 10, 12, 8]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """All modules, loaded as users do; `evaluate` copies them into a cache, which is not the user's here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE"):
            patch.setattr(evaluate.config, name, tmp_path_factory.mktemp(name.lower()))
        yield {name: evaluate.load(metric_module(name)) for name in NAMES}


def speedup(loaded, **columns):
    arms = {"seconds": SECONDS, "tokens": TOKENS}
    arms |= {"baseline_seconds": BASELINE_SECONDS, "baseline_tokens": BASELINE_TOKENS}
    return loaded["decode_speedup"].compute(**(arms | columns))


@pytest.mark.parametrize("name", NAMES)
def test_example_in_the_description_gives_what_it_says(loaded, name):
    description = loaded[name].inputs_description
    examples = doctest.DocTestParser().get_doctest(description, {}, name, None, 0)
    assert len(examples.examples) >= 4
    assert doctest.DocTestRunner().run(examples).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_modules_say_what_they_measure_and_by_whom_it_is_defined(loaded, name):
    info = loaded[name].info
    assert len(info.description) > 100 and "2602.06036" in info.citation and "Returns:" in info.inputs_description


def test_accepted_length_agrees_with_the_functions_of_the_package(loaded):
    results = loaded["accepted_length"].compute(predictions=ACCEPTED_LENGTHS, block_size=4)
    assert results["tau"] == pytest.approx((7 / 3 + 1 + 2.5 + 3 + 2.5) / 5)
    assert results["tau_pooled"] == pytest.approx(26 / 11)
    assert results["drafts_per_round"] == pytest.approx(15 / 11)
    assert results["accepted_length_counts"] == [3, 4, 1, 3]
    assert results["acceptance_per_slot"] == pytest.approx([8 / 11, 4 / 11, 3 / 11])
    assert results["full_block_rate"] == pytest.approx(3 / 11)
    taus = [statistics.fmean(lengths) for lengths in ACCEPTED_LENGTHS if lengths]
    assert results["tau_interval"] == pytest.approx(metrics.mean_interval(taus))


def test_accepted_length_of_no_rounds_is_unknown(loaded):
    results = loaded["accepted_length"].compute(predictions=[[], []], block_size=4)
    assert results["tau"] is None and results["tau_pooled"] is None and results["acceptance_per_slot"] is None
    assert results["accepted_length_counts"] == [0, 0, 0, 0]


def test_round_longer_than_a_block_is_refused(loaded):
    with pytest.raises(ValueError, match="committed 4 tokens"):
        loaded["accepted_length"].compute(predictions=[[4]], block_size=3)


def test_turns_of_one_prompt_count_as_one_for_the_intervals(loaded):
    groups = ["a", "a", "b", "b", "c", "d"]
    alone = loaded["accepted_length"].compute(predictions=ACCEPTED_LENGTHS, block_size=4)
    grouped = loaded["accepted_length"].compute(predictions=ACCEPTED_LENGTHS, block_size=4, groups=groups)
    assert grouped["tau"] == alone["tau"] and grouped["tau_interval"] != alone["tau_interval"]
    assert speedup(loaded, groups=["a", "a", "b", "b"])["speedup_interval"] is None


def test_speedup_is_the_ratio_of_mean_times_per_token(loaded):
    results = speedup(loaded)
    assert results["speedup"] == pytest.approx((0.5 + 2.5 + 1.0 + 1.0) / (0.5 + 0.25 + 0.25 + 0.5))
    assert results["speedup_median"] == pytest.approx(statistics.median([1.0, 10.0, 4.0, 2.0]))
    assert results["tokens_per_second"] == pytest.approx((2 + 4 + 4 + 2) / 4)
    assert results["baseline_tokens_per_second"] == pytest.approx((2 + 0.4 + 1 + 1) / 4)
    low, high = results["speedup_interval"]
    assert low < results["speedup"] < high


@pytest.mark.parametrize(("name", "value"), [("tokens", 0), ("seconds", 0.0), ("baseline_seconds", -1.0)])
def test_answers_without_time_or_tokens_are_refused(loaded, name, value):
    column = {"tokens": TOKENS, "seconds": SECONDS, "baseline_seconds": BASELINE_SECONDS}[name]
    with pytest.raises(ValueError, match="Answer 3 has .* both must be positive"):
        speedup(loaded, **{name: [*column[:3], value]})


def test_shorter_answer_differs_where_it_ends(loaded):
    results = loaded["identical_output"].compute(
        predictions=[[1, 2, 3], [1, 2], [4, 2, 3], []], references=[[1, 2, 3], [1, 2, 3], [1, 2, 3], []]
    )
    assert results == {"identical": 0.5, "num_identical": 2, "first_differences": [None, 2, 0, None]}


def test_metric_module_is_a_folder_of_the_package_and_names_the_others():
    assert all((Path(metric_module(name)) / f"{name}.py").is_file() for name in NAMES)
    with pytest.raises(
        ValueError, match="no metric module 'tau'; choose from accepted_length, decode_speedup, identical"
    ):
        metric_module("tau")
