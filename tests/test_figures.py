import statistics

import pytest

from dflash_hf.eval.figures import AnswerRecord, identity_rows, result_rows

NOT_TOLD = {"draft_seconds": None, "verify_seconds": None, "num_proposals": [], "num_first": 1, "difference": None}


def record(method: str, prompt_id: str, lengths: list[int], seconds: list[float], **fields) -> AnswerRecord:
    names = {"task": "code", "turn": 0, "temperature": 0.0, "prompt_tokens": 4, "prefill_seconds": 0.5}
    token_ids = list(range(1 + sum(lengths)))
    return AnswerRecord(
        names
        | NOT_TOLD
        | {"method": method, "prompt_id": prompt_id, "token_ids": token_ids}
        | {"accepted_lengths": lengths, "round_seconds": seconds}
        | fields
    )


def pairs(**fields) -> list[AnswerRecord]:
    records = []
    for number, fast in enumerate([1.0, 1.2, 1.4, 1.6]):
        records.append(record("plain", str(number), [1] * 6, [1.0] * 6, **fields))
        records.append(record("dflash", str(number), [3, 3], [fast, fast], **fields))
    return records


def row_of(rows, **names):
    return next(row for row in rows if all(row[key] == value for key, value in names.items()))


def test_speedup_is_the_ratio_of_mean_times_per_token():
    row = row_of(result_rows(pairs(), 8), method="dflash", task="code")
    times = [2 * fast / 6 for fast in (1.0, 1.2, 1.4, 1.6)]
    assert row["speedup"] == pytest.approx(1.0 / statistics.fmean(times))
    assert row["speedup_median"] == pytest.approx(statistics.median(1.0 / time for time in times))
    low, high = row["speedup_interval"]
    assert low < row["speedup"] < high
    # End to end each of the seven tokens shares the half second of the prompt.
    assert row["end_to_end_speedup"] == pytest.approx(6.5 / (0.5 + 6 * statistics.fmean(times)))


def test_plain_decoding_is_its_own_baseline():
    row = row_of(result_rows(pairs(), 8), method="plain", task="all")
    assert row["speedup"] == row["end_to_end_speedup"] == row["tau"] == 1.0
    assert row["acceptance_per_slot"] is None and row["full_block_rate"] is None
    assert row["accepted_length_counts"] == [24, 0, 0, 0, 0, 0, 0, 0]


def test_accepted_lengths_give_tau_slots_and_counts():
    row = row_of(result_rows(pairs(), 4), method="dflash", task="all")
    assert row["tau"] == row["tau_pooled"] == 3.0 and row["drafts_per_round"] == 2.0
    assert row["acceptance_per_slot"] == [1.0, 1.0, 0.0] and row["full_block_rate"] == 0.0
    assert row["accepted_length_counts"] == [0, 0, 8, 0]
    assert row["answers"] == row["prompts"] == 4 and row["tokens"] == 28


def test_a_method_that_commits_more_than_a_block_gets_more_slots():
    records = [record("plain", "a", [1] * 9, [1.0] * 9), record("assistant", "a", [9], [2.0])]
    row = row_of(result_rows(records, 4), method="assistant", task="all")
    assert len(row["acceptance_per_slot"]) == 8 and row["full_block_rate"] is None


def test_arms_of_unequal_length_are_compared_at_the_same_number_of_tokens():
    plain = record("plain", "a", [1] * 4, [1.0] * 4)
    drafted = record("dflash", "a", [4, 4], [2.0, 6.0])
    row = row_of(result_rows([plain, drafted], 8), method="dflash", task="all")
    assert row["speedup"] == pytest.approx(4.0 / 2.0)


def test_answers_of_one_token_have_tau_but_no_speed():
    row = row_of(result_rows([record("plain", "a", [], []), record("dflash", "a", [], [])], 8), method="dflash")
    assert row["speedup"] is None and row["tau"] is None and row["tokens_per_second"] is None
    assert row["time_to_first_token_ms"] == 500.0 and row["time_to_first_token_interval"] is None


def test_turns_are_one_prompt_and_tasks_and_temperatures_are_kept_apart():
    records = [*pairs(), *pairs(turn=1), *pairs(temperature=1.0), *pairs(task="chat")]
    rows = result_rows(records, 8)
    assert row_of(rows, method="dflash", temperature=0.0, task="code")["prompts"] == 4
    assert row_of(rows, method="dflash", temperature=0.0, task="code")["answers"] == 8
    assert row_of(rows, method="dflash", temperature=0.0, task="all")["answers"] == 12
    assert row_of(rows, method="dflash", temperature=1.0, task="all")["answers"] == 4


def test_shares_are_over_the_answers_that_tell():
    told = record("dflash", "a", [3, 3], [1.0, 1.0], draft_seconds=0.5, verify_seconds=1.0)
    silent = record("dflash", "b", [3, 3], [1.0, 1.0])
    plain = [record("plain", name, [1] * 6, [1.0] * 6) for name in "ab"]
    row = row_of(result_rows([*plain, told, silent], 8), method="dflash", task="all")
    assert row["draft_share"] == 0.25 and row["verify_share"] == 0.5


def test_identity_tells_near_ties_from_faults():
    other = [0, 1, 9, 3, 4, 5, 6]
    tie = {"position": 2, "margin": 0.01, "bound": 0.1}
    fault = {"position": 2, "margin": 3.0, "bound": 0.1}
    records = [
        *pairs(),
        record("plain", "t", [1] * 6, [1.0] * 6),
        record("dflash", "t", [3, 3], [1.0, 1.0], token_ids=other, difference=tie),
        record("plain", "f", [1] * 6, [1.0] * 6),
        record("dflash", "f", [3, 3], [1.0, 1.0], token_ids=other, difference=fault),
    ]
    (row,) = identity_rows(records, "bfloat16")
    assert (row["answers"], row["identical"], row["near_ties"], row["unexplained"]) == (6, 4, 1, 1)
    assert row["largest_margin"] == 3.0 and row["bound"] == 0.1


def test_sampled_answers_have_no_identity_row():
    assert identity_rows(pairs(temperature=1.0), "float32") == []
