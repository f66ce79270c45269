"""The file of answers: a killed run leaves it whole, and the next run goes on by the same settings."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dflash_hf.trainer.data import read_json_lines
from dflash_hf.trainer.prompt_rows import Conversation
from dflash_hf.trainer.provenance import write_json

_SYNC_SECONDS = 5.0


@dataclass
class Tally:
    """What became of the prompts of a run."""

    bad: list[str] = field(default_factory=list)
    num_too_long: int = 0
    num_written: int = 0
    num_truncated: int = 0
    num_new_tokens: int = 0
    unfinished: Counter[str] = field(default_factory=Counter)

    def report(self, prompts: str, max_prompt_length: int) -> str:
        """A line for each kind of prompt without a row; empty if all have one."""
        lines = []
        if self.bad:
            lines.append(
                f"{len(self.bad)} rows of {prompts} cannot be answered, the first: {'; '.join(self.bad[:3])}."
            )
        if self.num_too_long:
            limit = f"--max_prompt_length {max_prompt_length}"
            lines.append(f"{self.num_too_long} prompts are longer than {limit} and were skipped.")
        if self.unfinished:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.unfinished.most_common())
            total = sum(self.unfinished.values())
            lines.append(f"{total} answers were not kept ({reasons}); run again to ask once more.")
        return "\n".join(lines)


def finished_ids(output: Path) -> set[str]:
    """Ids of the rows of `output`; cuts off a last line that a kill left half written."""
    if not output.exists():
        return set()
    with open(output, "rb+") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
    return {row["id"] for row in read_json_lines(output)}


def check_settings(output: Path, settings: dict[str, Any], *, is_begun: bool) -> None:
    """Keeps `settings` in `<output>.settings.json`, if they agree with those that began `output`.

    Args:
        output (`Path`): The file of answers.
        settings (`dict`): Settings that rows depend on; those not yet known may be left out.
        is_begun (`bool`): Whether `output` has rows; if not, older settings are forgotten.
    Raises:
        ValueError: If a setting differs; the message names old and new values.
    """
    settings_file = output.with_name(output.name + ".settings.json")
    before = json.loads(settings_file.read_text()) if is_begun and settings_file.exists() else {}
    changed = sorted(name for name in settings if before and before.get(name) != settings[name])
    if changed:
        differences = ", ".join(f"`{name}` was {before.get(name)!r}, now {settings[name]!r}" for name in changed)
        raise ValueError(
            f"{output} was begun with other settings: {differences}. Use the first ones, or write to another place."
        )
    write_json(settings_file, before | settings)


def append_rows(
    output: Path, answered: Iterable[Conversation], tally: Tally, *, num_prompts: int, num_finished: int
) -> None:
    """Appends a row for each answered conversation as it comes, and counts them in `tally`.

    Each row is handed to the system at once, so a killed process loses none; every few seconds the file is synced.

    Args:
        output (`Path`): The file of answers.
        answered: Conversations; those that ended by neither `"stop"` nor `"length"` get no row.
        tally (`Tally`): Counts of this run.
        num_prompts (`int`): Prompts without a row when the run began.
        num_finished (`int`): Rows of earlier runs.
    """
    started = last_sync = time.monotonic()
    num_bad = len(tally.bad)
    with (
        open(output, "a", encoding="utf-8") as file,
        tqdm(total=num_finished + num_prompts, initial=num_finished, unit="answer") as progress,
    ):
        for conversation in answered:
            if conversation.finish_reason in ("stop", "length"):
                file.write(json.dumps(conversation.to_row()) + "\n")
                file.flush()
                tally.num_written += 1
                tally.num_truncated += conversation.finish_reason == "length"
                tally.num_new_tokens += sum(conversation.loss_mask)
            else:
                tally.unfinished[conversation.finish_reason] += 1
            now = time.monotonic()
            if now - last_sync > _SYNC_SECONDS:
                os.fsync(file.fileno())
                last_sync = now
            rate = f"{tally.num_new_tokens / (now - started):.0f}"
            progress.set_postfix({"tokens/s": rate, "truncated": tally.num_truncated}, refresh=False)
            progress.total = num_finished + num_prompts - tally.num_too_long - (len(tally.bad) - num_bad)
            progress.update()
        os.fsync(file.fileno())
