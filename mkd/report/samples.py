"""Texts that the student has written (--kd-sample-prompts), for the console, the metrics file and the trackers."""

from dataclasses import dataclass

_PROMPT, _TEXT = 60, 400
"""Characters of a prompt's end and of a text's beginning that a console line shows."""


@dataclass(frozen=True)
class Sample:
    """A prompt and the student's continuation."""

    prompt: str
    text: str
    tokens: int
    """Number of tokens of the continuation."""
    ended: bool
    """True if the student has ended the text; False if it reached --kd-sample-tokens."""


def sample_line(number: int, iteration: int, sample: Sample) -> str:
    """One console line; line breaks are escaped and long texts are cut."""
    prompt = sample.prompt if len(sample.prompt) <= _PROMPT else "..." + sample.prompt[-_PROMPT:]
    text = sample.text if len(sample.text) <= _TEXT else sample.text[:_TEXT] + "..."
    return f"sample {number} at iteration {iteration}: {_escaped(prompt)} => {_escaped(text)}"


def samples_as_markdown(samples: list[Sample]) -> str:
    """A section per sample, with the texts as code blocks."""
    parts = []
    for number, sample in enumerate(samples, start=1):
        blocks = ("\n".join(f"    {line}" for line in text.splitlines()) for text in (sample.prompt, sample.text))
        parts.append(f"**{number}**\n\n" + "\n\n=>\n\n".join(blocks))
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """The text without characters that control a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
