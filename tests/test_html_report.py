import re
from html.parser import HTMLParser

import pytest
from report_material import METHODS, TASKS, make_report, make_serving_report, result_row

from dflash_hf.eval.html_report import html_page
from dflash_hf.eval.plots import SERIES_COLOURS

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements of a page in their order, and whether every one is closed where it must be."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def source() -> str:
    return html_page(make_report())


@pytest.fixture(scope="module")
def page(source) -> Page:
    return Page(source)


@pytest.fixture(scope="module")
def serving_source() -> str:
    return html_page(make_serving_report(hardware={"processor": "NVIDIA H200"}))


@pytest.fixture(scope="module")
def serving_page(serving_source) -> Page:
    return Page(serving_source)


def small_report(**provenance) -> dict:
    """A report whose page is drawn quickly."""
    return make_report(**provenance) | {"results": [result_row("dflash", "all"), result_row("dflash", "code")]}


def test_page_loads_nothing_and_runs_nothing(source, serving_source):
    for text in (source, serving_source):
        page = Page(text)
        assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.elements}
        links = [a.get(key) for _, a in page.elements for key in ("href", "src", "xlink:href") if a.get(key)]
        assert links and all(link.startswith(("#", "data:")) for link in links)
        assert "@import" not in text and not re.search(r"url\((?!#)", text)


def test_headline_gives_figures_with_their_intervals(page):
    words = page.words()
    for figure in (
        "Speed-up, greedy 2.42x 95% interval 2.17 to 2.66",
        "tau, temperature 1 2.64 95% interval 2.50 to 2.77",
    ):
        assert figure in words
    assert "Identical, greedy 98% of 120 answers" in words


def test_headline_says_why_an_interval_is_missing():
    report = small_report()
    report["results"][0]["tau_interval"] = None
    assert "tau, greedy 3.14 no interval: too few prompts" in Page(html_page(report)).words()


def test_rows_of_a_task_stand_under_its_name(page):
    groups = [a for a in page.all("tr") if a.get("class") == "group"]
    # Two tables of results and two of acceptance with five tasks each, and one of identity with one temperature.
    assert len(groups) == 4 * (len(TASKS) + 1) + 1
    words = page.words()
    assert "all, 120 prompts plain 1.00 [1.00, 1.00]" in words
    assert "json, 30 prompts plain" in words and all(words.count(f" {method} ") >= 10 for method in METHODS)


def test_tables_can_be_scrolled_by_keyboard_and_name_their_rows_and_columns(page):
    regions = [a for a in page.all("div") if a.get("class") == "table"]
    assert len(regions) == len(page.all("table")) == 5
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in regions)
    assert {a["scope"] for a in page.all("th") if "colspan" not in a} == {"col", "row"}


def test_every_plot_has_a_caption_and_an_alternative_text(page, serving_page):
    assert len(page.all("figure")) == len(page.all("figcaption")) == 6 and len(serving_page.all("figure")) == 1
    drawings = [a for a in [*page.all("svg"), *serving_page.all("svg")] if a.get("role") == "img"]
    assert len(drawings) == 7 and all(len(a["aria-label"]) > 60 for a in drawings)


def test_drawings_are_elements_of_the_page_not_files(source):
    assert not any(words in source for words in ("<?xml", "DOCTYPE svg", "<!--"))


def test_ids_are_unique_and_references_point_at_them(source):
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', source)
    assert references and {link or url for link, url in references} <= set(ids)


def test_colours_of_plots_follow_the_page_in_the_dark(source):
    drawings = "".join(re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL))
    light, dark = source.split("prefers-color-scheme: dark", 1)
    names = {"ink", "faint", "paper", *(f"series-{k}" for k in range(1, len(SERIES_COLOURS) + 1))}
    for name in names:
        assert f"--{name}:" in light and f"--{name}:" in dark
    assert set(re.findall(r"var\(--([\w-]+)", drawings)) <= names and "var(--series-1" in drawings
    for colour, name in zip(SERIES_COLOURS, sorted(names - {"ink", "faint", "paper"}), strict=True):
        assert f"--{name}: {colour};" in light


def test_text_of_a_report_cannot_become_markup():
    evil = '<img src=x onerror="alert(1)">&'
    report = small_report(drafter=evil, command=evil, quantization=evil, attention=evil)
    report["skipped_methods"] = {evil: evil}
    report["results"][1]["task"] = evil
    text = html_page(report)
    page = Page(text)
    assert "img" not in {tag for tag, _ in page.elements} and "onerror" not in {k for _, a in page.elements for k in a}
    assert "<img" not in text and page.words().count("alert(1)") >= 8
    assert f"Evaluation of {evil} for org/target" in Page(text).words()


def test_dollars_in_a_report_stay_dollars():
    assert "Command cost $title" in Page(html_page(small_report(command="cost $title"))).words()


def test_page_says_how_it_was_measured_what_its_limits_are_and_what_to_note(page):
    words = page.words()
    assert (
        "How it was measured Command dflash-eval --output_dir runs/eval --temperatures 0 1 Target org/target" in words
    )
    assert "Limits Speed-ups hold for this hardware" in words and "this server" not in words
    assert "Repeated 4-grams exceed 0.15 (greedy)" in words and "authors was not measured" in words


def test_server_has_a_page_of_its_own(serving_page):
    words = serving_page.words()
    assert "Highest throughput 7,680 tok/s json, 32 in flight" in words
    assert "Lowest concurrency 440 tok/s code, 1 in flight" in words
    assert "Failed requests 0 1,536 were answered" in words and "NVIDIA H200" in words
    assert "number format not recorded" in words and "not quantised" not in words
    assert "this server, its settings" in words and "one answer at a time" not in words
