"""What `dflash-hub check` found: a line per subject, and one line that says what to do."""

from dataclasses import asdict, dataclass, field
from typing import Any

# Below the first, drafting costs more than it gives almost everywhere; below the second, on many machines.
USELESS_TAU, SMALL_TAU = 1.1, 1.5
LEVELS = ("ok", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """What is known of one subject.

    Args:
        subject (`str`): What was looked at.
        level (`str`): `"ok"`; `"note"`, which needs no action; `"warning"`, which may cost speed or probabilities;
            `"error"`, with which the pair must not be used.
        text (`str`): What was found, with the values met.
        advice (`str`): What to do about it.
    """

    subject: str
    level: str
    text: str
    advice: str = ""


@dataclass
class CheckReport:
    """All findings about a target and a drafter.

    Args:
        target, drafter (`str`): What they are.
        findings (`list[Finding]`): In the order of the checks.
        metrics (`dict`): `tau`, `acceptance_slot_k` and others of the decoding; empty if nothing was decoded.
    """

    target: str
    drafter: str
    findings: list[Finding] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def of(self, level: str) -> list[Finding]:
        """The findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def has_errors(self) -> bool:
        return bool(self.of("error"))

    @property
    def advice(self) -> str:
        """What to do, in one line."""
        errors, warnings = self.of("error"), self.of("warning")
        if errors:
            return f"do not use this pair before this is repaired: {_subjects(errors)}."
        tau = self.metrics.get("tau")
        gain = "" if tau is None else f" One forward of the target gives {tau:.2f} tokens."
        if warnings:
            return f"the answers stay the target's, but look at this first: {_subjects(warnings)}.{gain}"
        if tau is None:
            return "nothing is wrong so far; measure tau on a few prompts before you rely on it."
        if tau < SMALL_TAU:
            return f"measure speed with `dflash-eval` before you rely on it.{gain}"
        return f"use it.{gain}"

    def to_dict(self) -> dict[str, Any]:
        """The report for a JSON file."""
        return asdict(self) | {"has_errors": self.has_errors, "advice": self.advice}

    def __str__(self) -> str:
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [f"target   {self.target}", f"drafter  {self.drafter}", ""]
        for finding in self.findings:
            lines.append(f"{finding.level:8} {finding.subject:{width}}  {finding.text}")
            if finding.advice:
                lines.append(f"{'':8} {'':{width}}  -> {finding.advice}")
        return "\n".join([*lines, "", f"Advice: {self.advice}"])


def _subjects(findings: list[Finding]) -> str:
    return ", ".join(dict.fromkeys(finding.subject for finding in findings))
