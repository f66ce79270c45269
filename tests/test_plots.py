import builtins
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from report_material import METHODS, TASKS, make_report, make_serving_report, result_row

from dflash_hf.eval.plots import Plot, moved_apart, plots, serving_plots, temperature_plots, write_plots

NAMES = ("speedup", "acceptance", "accepted-lengths")
SVG = "{http://www.w3.org/2000/svg}"


def texts(plot: Plot) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(plot.svg).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def drawn() -> dict[str, Plot]:
    """Plots of the hand-made reports by name."""
    return {plot.name: plot for report in (make_report(), make_serving_report()) for plot in plots(report)}


def with_rows(*rows) -> dict:
    return make_report() | {"results": list(rows)}


def bar_heights(plot: Plot) -> list[float]:
    """Heights of the bars: closed paths of four corners in the colour of the first series."""
    heights = []
    for path in ElementTree.fromstring(plot.svg).iter(f"{SVG}path"):
        if "fill: #0072b2" in path.get("style", ""):
            numbers = path.get("d").replace("M", " ").replace("L", " ").replace("z", " ").split()
            y_values = [float(number) for number in numbers[1::2]]
            heights.append(max(y_values) - min(y_values))
    return heights


def test_every_temperature_has_its_plots_and_a_server_has_its_own(drawn):
    temperatures = [f"{name}-{sampling}" for sampling in ("greedy", "temperature-1") for name in NAMES]
    assert list(drawn) == [*temperatures, "throughput"]
    assert serving_plots(make_report()) == []


def test_plots_are_written_under_their_names(drawn, tmp_path):
    paths = write_plots(make_serving_report(), tmp_path / "new" / "plots")
    assert paths == [tmp_path / "new" / "plots" / "throughput.svg"]
    assert paths[0].read_text(encoding="utf-8") == drawn["throughput"].svg


def test_same_report_gives_the_same_bytes_without_date_or_version(drawn, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert temperature_plots(make_report(), 0.0) == [drawn[f"{name}-greedy"] for name in NAMES]
    assert not any(word in plot.svg for plot in drawn.values() for word in ("Matplotlib v", "dc:date", "dc:creator"))


def test_settings_of_the_user_do_not_reach_the_plots(drawn):
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "path", "text.color": "red"}):
        assert serving_plots(make_serving_report()) == [drawn["throughput"]]
        assert matplotlib.rcParams["font.size"] == 30


def test_text_stays_text_and_lines_are_named_beside_them(drawn):
    assert {*METHODS, *TASKS, "all"} <= set(texts(drawn["speedup-greedy"]))
    labels = texts(drawn["acceptance-greedy"])
    assert {"json, tau 4.70", "code, tau 3.81", "all, tau 3.14", "maths, tau 3.14", "chat, tau 2.09"} <= set(labels)
    assert {"1", "7", "0", "100%"} <= set(labels) and "8" not in labels
    assert {*TASKS, "1", "32", "0"} <= set(texts(drawn["throughput"]))


def test_names_are_shown_as_they_are():
    name = "a<b & $x^2$ -->"
    (plot,) = temperature_plots(with_rows(result_row("prompt_lookup", "code") | {"task": name}), 0.0)
    assert name in texts(plot)


def test_bars_are_as_long_as_their_shares():
    row = result_row("dflash", "all") | {"accepted_length_counts": [40, 20, 0, 10, 10, 10, 5, 5]}
    plot = temperature_plots(with_rows(row), 0.0)[-1]
    heights = bar_heights(plot)
    shares = [height / heights[0] for height in heights]
    assert shares == pytest.approx([1, 0.5, 0, 0.25, 0.25, 0.25, 0.125, 0.125], abs=1e-3)
    assert {"40%", "20%", "0%", "5%"} <= set(texts(plot)) and "share of 100 verify forwards" in plot.caption


def test_speedups_start_at_zero_and_show_plain_decoding(drawn):
    assert {"0.0", "1.0", "plain"} <= set(texts(drawn["speedup-greedy"]))


def test_plots_speak_to_readers_who_do_not_see_them(drawn):
    speedup = drawn["speedup-greedy"]
    assert "95% interval over prompts" in speedup.caption and "greedy" in speedup.caption
    assert "dflash on all 2.42" in speedup.alternative and "assistant on json 1.74" in speedup.alternative
    assert "plain on" not in speedup.alternative
    assert "all, tau 2.64: 63% at slot 1, 4% at slot 7" in drawn["acceptance-temperature-1"].alternative
    expected = "Tokens per second from 1 to 32 requests in flight: code from 440 to 7040"
    assert drawn["throughput"].alternative.startswith(expected)


def test_server_without_drafter_has_lines_of_its_own():
    report = make_serving_report()
    for row in report["serving"]:
        row |= {"temperature": 0.0, "baseline": {"tokens_per_second": row["tokens_per_second"] / 2}}
    labels = texts(serving_plots(report)[0])
    assert "code, greedy" in labels and "code, greedy, no drafter" in labels


def test_figures_that_are_unknown_leave_their_plot_out():
    rows = [result_row(method, "all") for method in ("plain", "prompt_lookup")]
    assert [plot.name for plot in plots(with_rows(*rows))] == ["speedup-greedy"]
    assert plots(with_rows(*(row | {"speedup": None, "speedup_interval": None} for row in rows))) == []
    assert len(plots(with_rows(rows[1] | {"speedup_interval": None}))) == 1


def test_many_tasks_and_wide_blocks_still_draw():
    slots = {"acceptance_per_slot": [0.9**k for k in range(1, 32)], "accepted_length_counts": list(range(32))}
    rows = [result_row("dflash", "code") | slots | {"task": f"task {k}", "speedup": None} for k in range(14)]
    acceptance, lengths = temperature_plots(with_rows(*rows, rows[0] | {"task": "all"}), 0.0)
    assert {f"task {k}, tau 3.81" for k in range(14)} <= set(texts(acceptance))
    assert "31" in texts(lengths)


def test_labels_move_as_little_as_possible():
    assert moved_apart([3.0, 1.0, 2.0], gap=0.5) == [3.0, 1.0, 2.0]
    assert moved_apart([1.0, 1.0], gap=1.0) == [0.5, 1.5]
    assert moved_apart([0.0, 5.0, 0.2, 0.1], gap=1.0) == pytest.approx([-0.9, 5.0, 1.1, 0.1])
    assert moved_apart([], gap=1.0) == []


def test_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"Plots need matplotlib: install `dflash-hf\[eval\]`"):
        plots(make_report())
