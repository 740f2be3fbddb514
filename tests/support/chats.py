"""Chat files and tokenizers with chat templates."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.e2e.small_job import END, make_tokenizer, save_tokenizer
from tests.support.hf_folders import change_json

HEAD = "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' }}"
TAIL = "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
TEXT = "{{ message['content'] + '<|end|>' }}"
MARKED = (
    HEAD
    + "{% if message['role'] == 'assistant' %}{% generation %}"
    + TEXT
    + "{% endgeneration %}{% else %}"
    + TEXT
    + "{% endif %}"
    + TAIL
)
"""Marks the assistant's tokens with {% generation %} blocks."""
PLAIN = HEAD + TEXT + TAIL
"""Renders the same text without the marks."""
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    + HEAD
    + "{{ message['reasoning_content'] or '' }}{{ message['content'] or '' }}"
    + "{% for call in message['tool_calls'] or [] %}{{ call.function.name }}{% endfor %}{{ '<|end|>' }}"
    + TAIL
)
"""Writes tools, reasoning and tool calls."""
FORGETFUL = "{% for message in messages[-2:] %}{{ message['role'] + message['content'] }}{% endfor %}"
"""Drops earlier messages, so the rendering of a prefix is not a prefix of the rendering."""
STRICT = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"


def chat_tokenizer(folder: Path, template: str | None) -> PreTrainedTokenizerBase:
    """A small byte-level tokenizer whose padding token is its end token, in a folder."""
    save_tokenizer(make_tokenizer(), folder)
    change_json(folder / "tokenizer_config.json", {"pad_token": END})
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return AutoTokenizer.from_pretrained(folder)


def talk(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Alternating user and assistant messages."""
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def write_lines(file: Path, records: list[Any]) -> Path:
    """A JSON lines file."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
